"""A peer of a live run without servers, inside the user's process."""
