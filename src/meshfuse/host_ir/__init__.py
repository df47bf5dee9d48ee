"""Programs per rank."""
