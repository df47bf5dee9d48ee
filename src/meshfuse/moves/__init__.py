"""From one sharding of a tensor to another: what a move is (`move`), what it costs, and the cheapest path of them.

Knows meshes and shardings, and of ops only the windows that they take; no graph. The planners ask it what a reshard
costs, `resharding` which moves to place.
"""
