"""Seen from outside: which samples were part of a gradient that counted.

A script draws from a `RecordedSampler` and says after each step what it used and whether that counted. Each worker
writes this to a file of its own, at once, so that a kill takes nothing away. Afterwards `counted` gathers the files,
and `lost` compares them with the epochs that the driver's dispatcher calls finished. Only that is taken from it.

Only what a step used *and* the script got to write is there, and acknowledgements leave later than that: so an
epoch the dispatcher calls finished must be whole in the files, whoever was killed when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path

from paceline.runtime.live.driver.sample_dispatchers import SamplerDispatch
from paceline.sampling import Sampler
from paceline.session import world


class RecordedSampler(Sampler):
    """A sampler of a live run that remembers what is drawn until it is used, and writes what counted into `folder`."""

    def __init__(self, dataset: Sized, folder: Path, seed: int = 0, per_step: int | None = None) -> None:
        super().__init__(dataset, seed, per_step)
        self.folder = folder
        self.drawn: deque[tuple[int, int]] = deque()
        """(epoch, sample), in the order they were drawn."""
        self.held: list[tuple[int, int]] = []
        """What the steps of a round have used that is not over."""

    def __iter__(self) -> Iterator[int]:
        live = world().live
        assert live is not None
        self.drawn.clear()
        for sample in super().__iter__():
            self.drawn.append((live.participation.leases.samplers[self.number].leased.current.epoch, sample))
            yield sample

    def used(self, samples: Sequence[int], counted: bool, at_round_end: bool = True) -> None:
        """Notes that a step used the oldest samples drawn. Call it right after the step, before anything else is
        drawn. With local steps they have counted when the round is over."""
        live = world().live
        assert live is not None
        oldest = [self.drawn.popleft() for _ in samples]
        assert [sample for _, sample in oldest] == list(samples), "the loop gets what was drawn, in that order"
        self.held += oldest
        if not at_round_end:
            return
        oldest, self.held = self.held, []
        if counted:
            with (self.folder / f"{live.run.rank}.{live.run.incarnation}.counted").open("ab", buffering=0) as file:
                file.write("".join(f"{epoch} {sample}\n" for epoch, sample in oldest).encode())


def counted(folder: Path, name: str = "*") -> dict[int, Counter[int]]:
    """Returns how often each sample of each epoch counted; of one worker if `name` is its RANK.INCARNATION."""
    found: dict[int, Counter[int]] = {}
    for path in folder.glob(f"{name}.counted"):
        for line in path.read_text().splitlines():
            epoch, sample = map(int, line.split())
            found.setdefault(epoch, Counter())[sample] += 1
    return found


def lost(folder: Path, dispatch: SamplerDispatch) -> dict[int, set[int]]:
    """Returns, for each epoch that is called finished, the samples that were part of no gradient that counted."""
    found = counted(folder)
    missing = {epoch: set(range(dispatch.size)) - set(found.get(epoch, ())) for epoch in dispatch.finished()}
    return {epoch: samples for epoch, samples in missing.items() if samples}
