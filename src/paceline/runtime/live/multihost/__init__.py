"""A host's agent, which runs processes for the driver of another host."""
