"""What the processes of a live run say to each other: message types and the run's configuration."""
