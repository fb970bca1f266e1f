"""Who sent a message between hosts, and how a wrong message is refused."""

from __future__ import annotations

LINES = 3
"""How many of a sender's wrong messages are logged one by one; from then on they are counted."""
Process = tuple[int, int]
"""Rank and incarnation."""


class MessageRefused(Exception):
    """A message that is not as it must be."""


def process_of(name: bytes) -> Process:
    """Returns the rank and incarnation that a name states."""
    rank, _, incarnation = name.partition(b":")
    try:
        return int(rank), int(incarnation)
    except ValueError:
        raise MessageRefused("its name is no worker's") from None
