"""Across hosts: agents, messages over TCP with keys, and the launchers that place processes (decision 20)."""
