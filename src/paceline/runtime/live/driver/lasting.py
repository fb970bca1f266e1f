"""The driver's side of a durable run: which servers can be brought back from their logs, and what that has cost.

When a whole run died, driver and all, the logs outlive it: `salvage` plays them to their ends and writes a checkpoint
of what comes out, and the run is resumed from that. Gradients that only waited for others are not in it: their workers
are gone, and so is what they would have been averaged with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.runtime.live import checkpoint, wire
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.server import durable
from paceline.runtime.live.server.replaying import Rebuilt, rebuild

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

OTHERS = "others.safetensors"
"""In the folder of the logs: what is not trained, as it was at the beginning."""


class Lasting:
    """Does nothing in a run that is not durable."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        keeping, meeting = driver.plan.keeping, driver.plan.meeting
        self.how = keeping.durable if keeping is not None else None
        self.folder = keeping.folder if keeping is not None else Path()
        self.covered: set[int] = set()
        """Servers that have a log of everything they have done."""
        self.costs: list[wire.Cost] = []
        if self.how is not None and meeting is not None and meeting.spread:
            raise ConfigError("a durable run has its servers beside the driver: its logs are on that host's disk")

    def begin(self) -> None:
        """The run is about to be configured: what is not trained belongs to what can be brought back."""
        if self.how is None:
            return
        try:
            folder = self.folder / durable.FOLDER
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            shutil.copy(self.driver.folder.path / "others", folder / OTHERS)
        except OSError as error:
            self.driver.say(f"WARNING: this run cannot be brought back as a whole: {error}; training goes on")

    def order_for(self, shard: int) -> wire.Journalled | None:
        """How this server, which starts now, is to log what it does, and whether it has done anything before."""
        if self.how is None:
            return None
        recover = shard in self.covered
        self.covered.add(shard)
        return wire.Journalled(str(durable.folder_of(self.folder, shard)), self.how, recover)

    def take(self, message: wire.Undurable) -> None:
        """A server cannot log, or cannot make its log shorter."""
        if not message.lost:
            why = (
                f"WARNING: server {message.shard} cannot shorten its log ({message.error}): it grows; training goes on"
            )
            self.driver.say(why)
            return
        self.covered.discard(message.shard)
        self.driver.say(
            f"WARNING: server {message.shard} cannot log ({message.error}): "
            "training goes on, and what it does from now on is NOT durable"
        )

    def restores(self, server: Child, code: int) -> bool:
        """Whether this server, which has ended, can be brought back from its log."""
        if server.rank not in self.covered or not (self.driver.begun or self.driver.asked_to_finish):
            return False
        if code > 0 and server.incarnation and server.rank not in self.driver.servers.configured:
            raise RunFailed(
                f"{server} cannot be brought back from its log in {self.folder / durable.FOLDER}: see above"
            )
        return True

    def finished(self, cost: wire.Cost | None) -> None:
        if cost is not None:
            self.costs.append(cost)

    def tell_cost(self) -> None:
        """At the end: what it took."""
        if not self.costs:
            return
        nbytes, pushes = sum(cost.nbytes for cost in self.costs), sum(cost.pushes for cost in self.costs)
        seconds, alive_s = sum(cost.seconds for cost in self.costs), sum(cost.alive_s for cost in self.costs)
        snapshots = sum(cost.snapshots for cost in self.costs)
        self.driver.say(
            f"durable: {nbytes / 1e6:.1f} MB logged for {pushes} pushes in {seconds:.2f} s, "
            f"{1e3 * seconds / max(pushes, 1):.3f} ms a push, {seconds / max(alive_s, 1e-9):.1%} of the servers' time"
            + (f"; {snapshots} snapshot{'s' * (snapshots > 1)}" if snapshots else "")
        )


def replay(run: Path) -> list[Rebuilt]:
    """The servers of a durable run as their logs give them back, by shard."""
    folders = _folders(run)
    if not folders:
        raise ConfigError(f"{str(run)!r} has no logs: it was not run with --durable")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a server: sums over other parts round otherwise
    try:
        return [rebuild(folder) for folder in folders]
    finally:
        torch.set_num_threads(threads)


def _folders(run: Path) -> list[Path]:
    return sorted((run / durable.FOLDER).glob("shard-*"), key=lambda path: int(path.name.partition("-")[2]))


def joined(rebuilt: list[Rebuilt]) -> dict[str, Tensor]:
    """The model's parameters, from all servers."""
    meta = rebuilt[0].meta
    whole = meta.layout.empty()
    for part, server in zip(meta.assignment, rebuilt, strict=True):
        for (start, stop), values in zip(part, server.optimizer.values.split([b - a for a, b in part]), strict=True):
            whole[start:stop] = values
    return meta.layout.named(whole)


def compare(rebuilt: list[Rebuilt], model: Path) -> list[str]:
    """The parameters that are not bit for bit what is in this file."""
    there = load_file(model)
    return [name for name, value in joined(rebuilt).items() if name not in there or not torch.equal(there[name], value)]


def salvage(run: Path) -> Path | None:
    """Make a checkpoint of what the logs of a run hold, if they know more than its last checkpoint does."""
    if not durable.numbers(durable.folder_of(run, 0), durable.SNAPSHOT):
        return None
    checkpoints = run / checkpoint.FOLDER
    number, epochs, known = 0, {}, -1
    try:
        path, manifest = checkpoint.latest(checkpoints)
        number, epochs = manifest.number, manifest.epochs
        known = sum(shard.version for shard in manifest.shards)
    except PacelineError:
        path = None
    for folder in _folders(run):
        os.close(durable.hold(folder))
    rebuilt = replay(run)
    meta = rebuilt[0].meta
    if len(rebuilt) != len(meta.assignment) or sum(each.machine.version for each in rebuilt) <= known:
        return None
    part = checkpoints / f"{number + 1:06d}{checkpoint.PART}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shards = tuple(
        checkpoint.write_shard(
            part, shard, each.optimizer.values, each.optimizer.state(), each.machine.progress.V, each.machine.version
        )
        for shard, each in enumerate(rebuilt)
    )
    others = checkpoint.others_of(path) if path is not None else run / durable.FOLDER / OTHERS
    shutil.copy(others, part / OTHERS)
    manifest = checkpoint.Manifest(number + 1, meta.policy, meta.layout, shards, OTHERS, epochs, meta.assignment)
    return checkpoint.commit(part, manifest)
