"""Plans after they are made: kept on disk, taken over for other sizes, cut in two."""
