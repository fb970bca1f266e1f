"""The commands of the `paceline` program, one a file: a dataclass of options with a `main` method."""
