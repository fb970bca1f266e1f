"""Competitors are measured in turn, round by round, so that whatever else the machine does slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turn(
    ways: Mapping[str, Callable[[], T]], rounds: int, tell: Callable[[int, dict[str, list[T]]], None] | None = None
) -> dict[str, list[T]]:
    """Measures each way once a round, and returns all that each has given; `tell` is called after each round."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, measure in ways.items():
            found[name].append(measure())
        if tell is not None:
            tell(number, found)
    return found


def milliseconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Returns how long some work takes: processor time, so that neighbours on the machine do not count."""
    began = clock()
    work()
    return 1e3 * (clock() - began)
