"""What the driver of a run decides: pure machines, events in and orders out."""
