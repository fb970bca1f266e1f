"""From a trace to numbers, pictures and timelines."""
