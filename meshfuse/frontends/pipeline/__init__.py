"""Pipeline parallelism: schedules as values, models cut into stages, and steps of micro-batches over ranks."""
