"""A worker of a live run, inside the user's process."""
