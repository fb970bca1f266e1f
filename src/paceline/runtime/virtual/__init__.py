"""The virtual runtime: one process, a simulated clock, real gradients."""
