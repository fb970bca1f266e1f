"""A server of a live run: one shard of the parameters."""
