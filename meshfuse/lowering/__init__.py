"""The program of each rank.

`lower` writes segments, moves and loops as instructions, `schedule` says when they run, and `verify` that the programs
of all ranks fit together.
"""
