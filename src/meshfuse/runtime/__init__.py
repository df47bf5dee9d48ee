"""The process side: which rank this is, the ranks it talks to, their collectives, and the launcher.

`environment` reads the launcher's variables, `store` joins the ranks' key-value store, `world` is the
process's own singleton, `meetings` what its ranks tell each other there, `group` the collectives of some ranks
(`gloo` for CPU, `nccl` for CUDA tensors), `liveness` finds out who failed, `launcher` looks after ranks from their
`starting` to their end, `doctor` reports what the machine offers.
"""
