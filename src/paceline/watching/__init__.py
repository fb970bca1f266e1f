"""To see a run while it runs: what it writes down, read by another process. Nothing here needs torch."""
