"""Running host programs.

`bind` makes functions of their text; `simulate` runs the programs of all ranks in this process, `spmd` this rank's
program on real ranks.
"""
