"""The program of each rank.

`host_ir` writes segments, reshards and loops as instructions, `schedule` says when they run, and `verify` that the
programs of all ranks fit together.
"""
