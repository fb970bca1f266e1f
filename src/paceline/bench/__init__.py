"""Benchmarks: paceline beside what a user would pick instead, in one run. `paceline bench exchange | straggler`."""
