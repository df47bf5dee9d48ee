"""`mf.plan`: which parallelism, stages and micro-batches a model's training step takes least time with."""
