"""Running host programs. `bind` makes functions of their text; `simulate` runs those of all ranks in this process, and
`spmd` the one of this rank, on real ones.
"""
