"""Processes: which rank this is, its peers, their collectives, and the launcher.

`world`: the singleton of this process. `environment` reads the launcher's variables, `store` joins the key-value store.
`job`: what the modules below `world` need to know of it.
`group`: the collectives of some ranks: over `gloo` for CPU tensors, over `nccl` for CUDA tensors, and through the host
    (`host_staging`) where ranks share a GPU. `device_watchdog` ends a rank whose device waits for a lost peer.
`rendezvous`: short texts that ranks exchange through the store. `collective_order` makes all ranks issue their calls in
    one order, `call_order` records that order.
`planning`: tells peers that this rank is planning, so that they wait longer. `plan_handover` gives them the plan.
`roll_call`, `peers`, `diagnosis`: which rank failed or does not answer, and the error that names it.
`exit_hooks`, `exit_page`, `sigterm_report`: how a rank ends, and what it leaves for the others.
`launcher`: starts ranks (`spawn`) and supervises them; `orphan_reaper` ends them if the launcher is killed.
`doctor`, `link_probe`: what the machine offers.
"""
