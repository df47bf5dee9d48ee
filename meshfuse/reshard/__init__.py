"""From one sharding of a tensor to another: the steps of a reshard (`steps`), their prices, and the cheapest plan.

Knows meshes, shardings and the windows that ops take, and no graph. Planners ask it what a reshard costs; `resharding`
asks which steps to insert.
"""
