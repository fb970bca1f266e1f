"""What workers and peers have in common: both run the user's script."""
