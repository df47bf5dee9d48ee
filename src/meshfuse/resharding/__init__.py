"""From one sharding to another: the moves, their costs and the cheapest path."""
