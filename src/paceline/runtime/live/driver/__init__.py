"""The driver of a live run: one process that starts the others, numbers the views, and notices everything."""
