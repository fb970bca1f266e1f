"""The line that says who is waited for: once, for one who never waits while the others mostly do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.runtime.live.driver.waited_for import LOOKS, WaitedFor
from paceline.runtime.live.protocol.wire import WorkerStatus


def said(waits: Callable[[int, int], bool], workers: Callable[[int], int] = lambda look: 4) -> list[str]:
    lines: list[str] = []
    waited_for = WaitedFor(Path("runs/x y"), lines.append)
    for look in range(3 * LOOKS):
        here = range(workers(look))
        waited_for.look({rank: WorkerStatus(look, "behind" if waits(rank, look) else "", 0) for rank in here})
    return lines


def test_who_is_waited_for_all_the_time_is_told_once() -> None:
    lines = said(lambda rank, look: rank != 2 and look % 4 > 0)
    assert lines == ["the others wait for worker 2, 75% of the time: paceline explain 'runs/x y' tells why"]


@pytest.mark.parametrize(
    "waits",
    [
        lambda rank, look: rank != look % 4,
        lambda rank, look: rank != 2 or look % LOOKS == 5,
        lambda rank, look: rank != 2 and look % 4 == 0,
        lambda rank, look: rank < 2,
        lambda rank, look: False,
    ],
    ids=["in turn", "it waits too", "seldom", "two do not wait", "nobody waits"],
)
def test_nobody_is_told_otherwise(waits: Callable[[int, int], bool]) -> None:
    assert said(waits) == []


def test_who_comes_or_goes_begins_it_anew() -> None:
    assert said(lambda rank, look: rank != 2, lambda look: 3 + look // (LOOKS - 1) % 2) == []
