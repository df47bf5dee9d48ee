"""Plans kept: on disk for other processes, in memory for other sizes."""
