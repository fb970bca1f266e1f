"""Two runtimes carry out what the core decides: `virtual` in one process, `live` in many."""
