"""The process side: which rank this is, the ranks it talks to, their collectives, and the launcher.

`world`: this process' own singleton; `environment` reads the launcher's variables for it, `store` joins the ranks'
    key-value store.
`group`: the collectives of some ranks; over `gloo` for CPU tensors, over `nccl` for CUDA tensors, `staged` through the
    host where ranks share a GPU. `watch` ends a rank whose device waits for a peer in vain.
`meetings`: short texts that ranks exchange through the store; `turns` keeps their calls in one order, which `calls`
    remembers.
`planning`: what a rank plans, which others may wait for longer than for anything else; `handing` gives them its plan.
`liveness`, `peers`, `diagnosis`: who failed or does not answer, and the error that says so.
`launcher`: starts ranks (`starting`) and looks after them until their end.
`doctor`, `link_probe`: what the machine offers.
"""
