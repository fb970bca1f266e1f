"""Flat parameter vectors, their slices, and the optimizers that step them. Knows torch, knows no runtime."""
