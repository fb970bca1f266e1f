"""Seen from outside: which samples were part of a gradient that counted.

A script draws from a `RecordedSampler` and says after each step what it used and whether that counted. Each worker
writes this to a file of its own, at once, so that a kill takes nothing away. Afterwards `counted` gathers the files,
and `lost` compares them with the epochs that the driver's deck calls finished. The deck is believed in that only.

Only what a step used *and* the script got to write is there, and acknowledgements leave later than that: so an
epoch the deck calls finished must be whole in the files, whoever was killed when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path

from paceline.runtime.live.driver.dealing_out import Table
from paceline.sampling import Sampler
from paceline.session import world


class RecordedSampler(Sampler):
    """Of a live run: remembers what is drawn until it is used, and writes what counted into `folder`."""

    def __init__(self, dataset: Sized, folder: Path, seed: int = 0, per_step: int | None = None) -> None:
        super().__init__(dataset, seed, per_step)
        self.folder = folder
        self.drawn: deque[tuple[int, int]] = deque()
        """(epoch, sample), as drawn."""

    def __iter__(self) -> Iterator[int]:
        live = world().live
        assert live is not None
        self.drawn.clear()
        for sample in super().__iter__():
            self.drawn.append((live.hands.holders[self.number].in_play.epoch, sample))
            yield sample

    def used(self, samples: Sequence[int], counted: bool) -> None:
        """A step used these, the oldest that were drawn. To be called right after it, before anything else is drawn."""
        live = world().live
        assert live is not None
        oldest = [self.drawn.popleft() for _ in samples]
        assert [sample for _, sample in oldest] == list(samples), "the loop gets what was drawn, in that order"
        if counted:
            with (self.folder / f"{live.rank}.{live.incarnation}.counted").open("ab", buffering=0) as file:
                file.write("".join(f"{epoch} {sample}\n" for epoch, sample in oldest).encode())


def counted(folder: Path, name: str = "*") -> dict[int, Counter[int]]:
    """Of each epoch: how often each sample counted; of one worker if `name` is its RANK.INCARNATION."""
    found: dict[int, Counter[int]] = {}
    for path in folder.glob(f"{name}.counted"):
        for line in path.read_text().splitlines():
            epoch, sample = map(int, line.split())
            found.setdefault(epoch, Counter())[sample] += 1
    return found


def lost(folder: Path, table: Table) -> dict[int, set[int]]:
    """Of each epoch that is called finished: the samples that were part of no gradient that counted."""
    found = counted(folder)
    missing = {epoch: set(range(table.size)) - set(found.get(epoch, ())) for epoch in table.finished()}
    return {epoch: samples for epoch, samples in missing.items() if samples}
