"""The driver's side of a durable run: which servers can be brought back from their logs, and what that has cost.

When a whole run died, driver and all, the logs outlive it: `salvage` plays them to their ends and writes a checkpoint
of what comes out, and the run is resumed from that. Gradients that only waited for others are not in it: their workers
are gone, and so is what they would have been averaged with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline import private_files, run_folder
from paceline.errors import ConfigError, Damaged, PacelineError
from paceline.run import write_whole
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.lr_scheduler_states import read_beside_logs, write_beside_logs
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.server.log_replay import Rebuilt, rebuild
from paceline.runtime.live.storage import checkpoint, update_log
from paceline.runtime.live.storage.checksums import check_file, file_hash, read_with_checksum, sync, with_checksum
from paceline.runtime.live.storage.update_log import LogEnd
from paceline.tensors.assignment import MOST_SERVERS

OTHERS, MANIFEST = checkpoint.OTHERS, checkpoint.MANIFEST
"""In the folder of the logs: what is not trained, as it was at the beginning, and a manifest."""


class LogLocation(Struct, frozen=True):
    """The manifest of the logs."""

    shards: int
    others_sha256: str = ""
    begun: bool = False
    """Before the run has begun no log has anything to bring back."""


class Durability:
    """Tells servers where to log, keeps the manifest of the logs, and adds up the cost; idle in a run without logs."""

    def __init__(self, checkpointing: CheckpointOptions | None, others: Path, say: Callable[[str], None]) -> None:
        """`others` is the file with what is not trained."""
        self.others = others
        self.say = say
        self.how = checkpointing.durable if checkpointing is not None else None
        self.folder = checkpointing.folder if checkpointing is not None else Path()
        self.covered: set[int] = set()
        """Servers that have a log of everything they have done."""
        self.costs: list[wire.Cost] = []

    def begin(self, servers: int) -> None:
        """Prepares the folder of the logs. Old logs are removed: what they held is in the checkpoint to start from."""
        if self.how is None:
            return
        folder = self.folder / update_log.FOLDER
        try:
            private_files.make_folder(folder, exist_ok=True)
            # First: this driver may be killed while the old logs are removed, and what is left of them is no damage.
            write_whole(folder / MANIFEST, with_checksum(LogLocation(servers)), private=True)
            for old in folder.glob(update_log.SHARDS):
                shutil.rmtree(old, ignore_errors=True)
            write_beside_logs(self.folder, b"")
            shutil.copy(self.others, folder / OTHERS)
        except OSError as error:
            self.say(f"WARNING: this run cannot be brought back as a whole: {error}; training goes on")

    def begun(self, servers: int) -> None:
        """Notes in the manifest that all servers have a log, and that from now on something is in it."""
        if self.how is None:
            return
        folder = self.folder / update_log.FOLDER
        try:
            logs = LogLocation(servers, file_hash(folder / OTHERS), begun=True)
            sync(write_whole(folder / MANIFEST, with_checksum(logs), private=True))
            sync(folder)
        except OSError as error:
            self.say(f"WARNING: this run cannot be brought back as a whole: {error}; training goes on")

    def order_for(self, shard: int) -> wire.Journalled | None:
        """Returns how this server, which starts now, is to log, and whether it recovers from its log; None: no log."""
        if self.how is None:
            return None
        recover = shard in self.covered
        self.covered.add(shard)
        return wire.Journalled(str(update_log.folder_of(self.folder, shard)), self.how, recover)

    def forget(self, shard: int) -> None:
        """Has this server begin its log anew: it has logged nothing that anybody was told."""
        self.covered.discard(shard)

    def lose_logs(self) -> None:
        """Notes that the folder of the logs is gone, and that the run is not durable any more."""
        if self.covered:
            self.say("WARNING: the servers' logs are gone: what they do from now on is NOT durable")
        self.covered.clear()
        self.how = None

    def take(self, message: wire.Undurable) -> None:
        """Notes that a server cannot log, or cannot shorten its log, and tells the user."""
        if not message.lost:
            why = (
                f"WARNING: server {message.shard} cannot shorten its log ({message.error}): it grows; training goes on"
            )
            self.say(why)
            return
        self.covered.discard(message.shard)
        self.say(
            f"WARNING: server {message.shard} cannot log ({message.error}): "
            "training goes on, and what it does from now on is NOT durable"
        )

    def keep_schedulers(self, states: bytes) -> None:
        """Keep the states of LR schedulers beside the logs, whose last checkpoint may be old."""
        if self.how is not None:
            # The logs go on if it cannot be written, or have said that they do not.
            with contextlib.suppress(OSError):
                write_beside_logs(self.folder, states)

    def unusable(self, shard: int) -> str:
        """What to say of a server that cannot be brought back from its log."""
        logs = self.folder / update_log.FOLDER
        return f"server {shard} cannot be brought back from its log in {logs}: see above; {way_on(self.folder)}"

    def finished(self, cost: wire.Cost | None) -> None:
        if cost is not None:
            self.costs.append(cost)

    def tell_cost(self) -> None:
        """Tells the user at the end what being durable has cost."""
        if not self.costs:
            return
        nbytes, pushes = sum(cost.nbytes for cost in self.costs), sum(cost.pushes for cost in self.costs)
        seconds, alive_s = sum(cost.seconds for cost in self.costs), sum(cost.alive_s for cost in self.costs)
        snapshots = sum(cost.snapshots for cost in self.costs)
        self.say(
            f"durable: {nbytes / 1e6:.1f} MB logged for {pushes} pushes in {seconds:.2f} s, "
            f"{1e3 * seconds / max(pushes, 1):.3f} ms a push, {seconds / max(alive_s, 1e-9):.1%} of the servers' time"
            + (f"; {snapshots} snapshot{'s' * (snapshots > 1)}" if snapshots else "")
        )


def replay(run: Path) -> list[Rebuilt]:
    """The servers of a durable run as their logs give them back, by shard; raises `Damaged` with the way to go on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a server: sums over other parts round otherwise
    try:
        logs = read_logs(run)
        if logs is None:
            raise ConfigError(f"{str(run)!r} has no logs: it was not run with --durable, or has not begun")
        rebuilt = [rebuild(folder) for folder in _folders(run, logs)]
        for each in rebuilt:
            if len(each.meta.assignment) != logs.shards or each.meta.layout != rebuilt[0].meta.layout:
                raise Damaged(f"the log of server {each.meta.shard} in {str(run)!r} belongs to another run")
    except Damaged as problem:
        raise Damaged(f"{problem}; {way_on(run)}") from None
    finally:
        torch.set_num_threads(threads)
    return rebuilt


def way_on(run: Path) -> str:
    """What can be done when the logs cannot be used."""
    usable = checkpoint.describe_all(run / checkpoint.FOLDER)
    if not usable:
        return "there is no checkpoint to go on from: start the run anew"
    return f"paceline resume {run} --from-checkpoint N goes on from a checkpoint instead (there are: {usable})"


def read_logs(run: Path) -> LogLocation | None:
    """The manifest of the logs; None if there are none, or the run they are of has not begun."""
    path = run / update_log.FOLDER / MANIFEST
    if not path.exists():
        if any(path.parent.glob(update_log.SHARDS)):
            raise Damaged(f"{path} is missing")
        return None
    logs = read_with_checksum(path, LogLocation)
    if not 1 <= logs.shards <= MOST_SERVERS:
        raise Damaged(f"{path} cannot be: it has {logs.shards} shards")
    return logs if logs.begun else None


def _folders(run: Path, logs: LogLocation) -> list[Path]:
    folders = [update_log.folder_of(run, shard) for shard in range(logs.shards)]
    for shard, folder in enumerate(folders):
        if not folder.is_dir():
            raise Damaged(f"{folder}, the log of server {shard}, is missing")
    return folders


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
    try:
        there = load_file(model)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{model} cannot be read: {error}") from None
    return [name for name, value in joined(rebuilt).items() if name not in there or not torch.equal(there[name], value)]


def can_be_resumed(run: Path) -> bool:
    """Whether a run that was stopped has left something to go on from."""
    return bool(checkpoint.whole(run / checkpoint.FOLDER)) or any((run / update_log.FOLDER).glob(update_log.SHARDS))


def find_start(run: Path, is_durable: bool, number: int | None, say: Callable[[str], None]) -> Path | None:
    """The checkpoint a run that is resumed starts from; None if it has none and starts from its beginning.

    That is the one with this number, if somebody has named one. Otherwise it is made of the logs, if these know more
    than the newest one, or it is the newest that is not damaged. If an older state is used, that is said.
    """
    checkpoints = run / checkpoint.FOLDER
    if number is not None:
        path, _ = checkpoint.find(checkpoints, number)
        if number == checkpoint.next_number(checkpoints) - 1:
            return path
        say(f"going on from checkpoint {number}, which is now the newest: {(path := checkpoint.repeat(path))}")
        return path
    if is_durable and checkpoint.whole(checkpoints) and not (run / update_log.FOLDER).is_dir():
        raise Damaged(f"{run / update_log.FOLDER}, the logs of this durable run, is missing; {way_on(run)}")
    if (made := salvage(run, say)) is not None:
        say(f"going on from the logs of the servers, now the checkpoint {made}")
        return made
    if not checkpoint.whole(checkpoints):
        if (run / run_folder.MODEL).exists():
            raise ConfigError(f"{str(run)!r} has a model, but no checkpoint to go on from")
        say("there is no checkpoint yet: the run starts from its beginning")
        return None
    return checkpoint.latest(checkpoints, say)[0]


def salvage(run: Path, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """Make a checkpoint of what the logs of a run hold, if they know more than its last checkpoint does."""
    checkpoints = run / checkpoint.FOLDER
    try:
        logs = read_logs(run)
        if logs is None:
            return None
        folders = _folders(run, logs)
        ends = [update_log.read_end(folder) for folder in folders]
    except Damaged as problem:
        raise Damaged(f"{problem}; {way_on(run)}") from None
    path, problems = checkpoint.newest(checkpoints)
    manifest = checkpoint.read(path) if path is not None else None
    if manifest is not None and not _know_more(ends, manifest):
        return None
    given_up = [shard for shard, end in enumerate(ends) if end.given_up]
    if given_up:
        shard = given_up[0]
        why = f"the logs are not complete: server {shard} could write no more of its after update {ends[shard].version}"
        if manifest is None:
            raise Damaged(f"{why}; {way_on(run)}")
        say(f"WARNING: {why}; going on from checkpoint {manifest.number}, at {checkpoint.describe(manifest)}")
        return None
    for folder in folders:
        os.close(update_log.hold(folder))
    rebuilt = replay(run)
    for passed_over in problems:
        say(f"WARNING: {passed_over}; the logs of the servers have everything that was trained")
    others = path / OTHERS if path is not None else run / update_log.FOLDER / OTHERS
    try:
        check_file(others, manifest.others_sha256 if manifest is not None else logs.others_sha256)
    except Damaged as problem:
        raise Damaged(f"{problem}; {way_on(run)}") from None
    epochs, schedulers = (manifest.epochs, manifest.schedulers) if manifest is not None else ({}, b"")
    try:
        schedulers = read_beside_logs(run) or schedulers
    except Damaged as problem:
        where = f"are those of checkpoint {manifest.number}" if manifest is not None else "begin afresh"
        say(f"WARNING: {problem}; LR schedulers {where}")
    return _make_checkpoint(checkpoints, rebuilt, others, epochs, schedulers)


def _know_more(ends: list[LogEnd], manifest: checkpoint.Manifest) -> bool:
    """Whether logs that end so have updates which the checkpoint has not."""
    shards = manifest.shards
    return len(ends) != len(shards) or any(end.version > it.version for end, it in zip(ends, shards, strict=True))


def _make_checkpoint(
    folder: Path, rebuilt: list[Rebuilt], others: Path, epochs: dict[int, int], schedulers: bytes
) -> Path:
    number, meta = checkpoint.next_number(folder), rebuilt[0].meta
    part = folder / f"{number:06d}{checkpoint.PART}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        private_files.make_folder(part)
        shards = tuple(
            checkpoint.write_shard(
                part, shard, it.optimizer.values, it.optimizer.state(), it.machine.progress.V, it.machine.version
            )
            for shard, it in enumerate(rebuilt)
        )
        shutil.copy(others, part / OTHERS)
        sha256 = file_hash(part / OTHERS)
        manifest = checkpoint.Manifest(
            number, meta.policy, meta.layout, shards, sha256, epochs, meta.assignment, schedulers
        )
        return checkpoint.commit(part, manifest)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise PacelineError(f"no checkpoint of the logs can be written to {folder}: {error}") from None
