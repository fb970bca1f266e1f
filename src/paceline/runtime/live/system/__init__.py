"""What a process of a live run asks of the operating system."""
