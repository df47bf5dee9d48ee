"""From one sharding of a tensor to another: what a move is (`move`), what it costs, and the cheapest path of moves.

Knows meshes, shardings and the windows that ops take, and no graph. Planners ask it what a reshard costs; `resharding`
asks which moves to place.
"""
