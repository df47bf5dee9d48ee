"""Which sharding every tensor has, and in which every op is computed."""
