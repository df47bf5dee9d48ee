"""The moves of a whole program: a `Set` for each, and where in the program it stands.

What the moves of one reshard are is told by `moves`.
"""
