"""What small changes to the exchange are worth on a noisy machine: one run that switches between them all the time.

    python benchmarks/exchange_switching.py --params 1e6 now together around
    python benchmarks/exchange_switching.py --params 1e6 now torch unlooked spin=50

Runs in turn (`exchange_variants.py`) cannot tell a few percent: from one minute to the next neighbours make more of a
difference. Here server and workers change what they do every tenth of a second, by the same clock, and the pushes of
each tenth are counted; neighbours disturb all alike.

    now         as it is
    torch       passes over memory are torch's
    together    pushes that have come together are stepped on in one pass, however small the model
    around      gradients go around the caches, however small the model
    through     and through them, however large
    unlooked    gradients are copied by torch, and nobody looks whether they are finite
    spin=US     the server is busy for so many microseconds more with each push
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.bench import exchange
from paceline.core.actions import Apply
from paceline.runtime.live.server import shard_executor
from paceline.runtime.live.server.server import LiveServer
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.tensors import fused_kernels

VARIANTS = ("now", "torch", "together", "around", "through", "unlooked", "spin")
AT_BOTH_ENDS = 3
"""Turns that do not count: not everybody is there."""


class Switch:
    """Has this process, and those forked from it, do something else in each tenth of a second."""

    def __init__(self, variants: list[str], seconds: float, counts: Path) -> None:
        self.variants = variants
        self.seconds = seconds
        self.counts = counts
        self.slot, self.pushes = 0, 0

    def now(self) -> int:
        return int(time.monotonic() / self.seconds)

    def is_on(self, name: str) -> bool:
        return self.variants[self.now() % len(self.variants)].partition("=")[0] == name

    def install(self) -> None:
        compiled, copy, worth_it = fused_kernels._passes, fused_kernels.copy_and_check_finite, shard_executor.WORTH_IT
        deferrable, note, let_others_run = ShardExecutor.deferrable, ShardExecutor.note, LiveServer.let_others_run

        def copy_and_check_finite(source: Any, target: Any, around: bool = False) -> bool:
            if self.is_on("unlooked"):
                target.copy_(source)
                return True
            fused_kernels._passes = None if self.is_on("torch") else compiled
            return copy(source, target, (around or self.is_on("around")) and not self.is_on("through"))

        def find_segment(mine: ShardExecutor, step: Apply) -> Any:
            shard_executor.WORTH_IT = 0 if self.is_on("together") else worth_it
            fused_kernels._passes = None if self.is_on("torch") else compiled
            return deferrable(mine, step)

        def let_run(mine: LiveServer) -> None:
            if not self.is_on("together"):
                let_others_run(mine)

        def count(mine: ShardExecutor, step: Apply) -> None:
            self.count()
            note(mine, step)

        replace: list[tuple[Any, str, Callable[..., Any]]] = [
            (fused_kernels, "copy_and_check_finite", copy_and_check_finite),
            (ShardExecutor, "deferrable", find_segment),
            (LiveServer, "let_others_run", let_run),
            (ShardExecutor, "note", count),
        ]
        for place, name, function in replace:
            setattr(place, name, function)

    def count(self) -> None:
        if (slot := self.now()) != self.slot:
            with self.counts.open("a") as file:
                print(self.slot, self.pushes, file=file)
            self.slot, self.pushes = slot, 0
        self.pushes += 1
        if self.is_on("spin"):
            name = self.variants[slot % len(self.variants)]
            until = time.perf_counter() + float(name.partition("=")[2]) / 1e6
            while time.perf_counter() < until:
                pass

    def turns(self) -> list[list[int]]:
        """Of each turn: the pushes under each variant."""
        found: dict[int, dict[int, int]] = {}
        for line in self.counts.read_text().splitlines():
            slot, pushes = map(int, line.split())
            found.setdefault(slot // len(self.variants), {})[slot % len(self.variants)] = pushes
        full = [[turn[index] for index in sorted(turn)] for turn in found.values() if len(turn) == len(self.variants)]
        return full[AT_BOTH_ENDS:-AT_BOTH_ENDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--pushes", type=int, default=12_000, help="of each worker")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slot-s", type=float, default=0.1, help="how long each time; several pushes should fit")
    options = parser.parse_args()
    unknown = [each for each in options.variants if each.partition("=")[0] not in VARIANTS]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]!r}: see --help")
    counts = {"params": int(options.params), "warm": 0, "count": options.pushes, "transport": "shm"}
    with tempfile.TemporaryDirectory() as folder:
        switch = Switch(options.variants, options.slot_s, Path(folder) / "counts")
        switch.install()
        exchange.measure_paceline("asp", options.workers, counts)
        turns = switch.turns()
    if not turns:
        raise SystemExit("too short: give more --pushes")
    for index, variant in enumerate(options.variants):
        mine = [turn[index] for turn in turns]
        ratio = statistics.median(turn[index] / max(1, turn[0]) for turn in turns)
        rate = sum(mine) / len(mine) / options.slot_s
        print(
            f"asp {options.params:.0e} {variant}: {rate:.0f} pushes/s, {ratio:.3f} times the first ({len(turns)} turns)"
        )


if __name__ == "__main__":
    main()
