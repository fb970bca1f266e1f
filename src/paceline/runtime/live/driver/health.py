"""Watching the workers of a live run: how they come along, and who is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from paceline.errors import printable
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire
from paceline.tensors.piece_optimizers import Hyper

STATUS_S, SILENT_S = 0.5, 1.0
"""How often a server reports; a longer gap than the second means that the server, or this driver, stood still, and no
    worker is blamed for it."""
FEW = 3
"""Rejected gradients that are told one by one."""


@dataclass(frozen=True)
class FaultPolicy:
    """What to do when something goes wrong."""

    restarts: int = 0
    """Failed or killed workers are started again, so many times in all; then they are dropped."""
    abort: bool = False
    """End the run when a worker fails that is not restarted, instead of going on without it."""
    hang_timeout_s: float | None = None
    """Kill a worker that is not waiting for anybody and has not pushed for so long."""
    timeout_s: float | None = None
    """Give the whole run up after so long."""
    grace_s: float | None = None
    """How long an interrupted run may take to end well."""


@dataclass(eq=False)
class HealthMonitor:
    """What the driver knows of the workers between their pushes."""

    hang_timeout_s: float | None
    state: RunState
    roster: Roster
    workers: Callable[[], Iterable[Child]]
    servers: Servers
    done: Collection[tuple[int, int]]
    """The peers whose processes only answer others."""
    waits: Callable[[], Mapping[int, str]]
    """Why the scheduler holds workers back."""
    say: Callable[[str], None]
    status: dict[int, wire.WorkerStatus] = field(default_factory=dict)
    """How the workers look from shard 0."""
    hyper: tuple[Hyper, ...] | None = None
    """What schedulers have changed the hyper-parameters to."""
    moved_s: dict[int, float] = field(default_factory=dict)
    """When each worker's push was last seen, and later by as long as nobody could have seen one."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When each server last told how the workers are."""
    looked_s: float = field(default_factory=time.monotonic)
    rejected: int = 0

    def take_status(self, status: wire.Status) -> None:
        now = time.monotonic()
        self.excuse_workers(now - self.heard_s.get(status.shard, now))
        self.heard_s[status.shard] = now
        if status.shard:
            self.moved_s.update((rank, now) for rank, seen in status.workers.items() if seen.waits)
            return
        held = self.waits()
        workers = {
            rank: structs.replace(seen, waits=printable(seen.waits) or held.get(rank, ""))
            for rank, seen in status.workers.items()
        }
        for rank, seen in workers.items():
            before = self.status.get(rank)
            if before is None or before.pushed != seen.pushed or seen.waits:
                self.moved_s[rank] = now
        self.status = workers
        if status.hyper is not None:
            self.hyper = status.hyper

    def take_peer(self, said: wire.PeerStatus) -> None:
        """A peer speaks for itself; who is stuck says nothing."""
        self.status[said.rank] = said.status
        self.moved_s[said.rank] = time.monotonic()
        if said.hyper is not None:
            self.hyper = said.hyper

    def excuse_workers(self, silent_s: float) -> None:
        """A server was silent for so long, or this driver looked at nothing: no worker could be seen to push then."""
        if silent_s > SILENT_S:
            now, excused_s = time.monotonic(), silent_s - STATUS_S
            self.moved_s = {rank: min(moved_s + excused_s, now) for rank, moved_s in self.moved_s.items()}

    def take_rejected(self, message: wire.Rejected) -> None:
        """The first few, then every tenth, hundredth, ...: a model that has diverged has no others."""
        self.rejected += 1
        which = f"of worker {message.worker}, iteration {message.iteration}: {printable(message.reason)}"
        if self.rejected <= FEW:
            self.say(f"rejected the gradient {which}")
        elif self.rejected % 10 ** max(1, len(str(self.rejected)) - 1) == 0:
            self.say(f"rejected {self.rejected} gradients so far, the last one {which}")

    def pushed(self, rank: int) -> int:
        """How many iterations a worker has pushed, as far as is known."""
        return self.status[rank].pushed if rank in self.status else 0

    def forget(self, rank: int) -> None:
        """Its process has ended; another may come."""
        self.status.pop(rank, None)
        self.moved_s.pop(rank, None)

    def excuse(self, ranks: Iterable[int]) -> None:
        """These stand still because they were told to: they are not stuck."""
        now = time.monotonic()
        self.moved_s.update((rank, now) for rank in ranks)

    def tick(self) -> None:
        """Give up workers that are alive but stuck. A server that is silent may be what a worker waits for."""
        limit = self.hang_timeout_s
        now, before_s = time.monotonic(), self.looked_s
        self.looked_s = now
        self.excuse_workers(now - before_s)
        if limit is None or not self.state.begun:
            return
        heard_s = min((self.heard_s.get(shard, 0.0) for shard in range(self.servers.count)), default=now)
        for child in self.workers():
            process = (child.rank, child.incarnation)
            if not self.roster.has(*process) or process in self.done:
                continue  # not in yet, or done: its process is only on its way out
            stuck = heard_s - self.moved_s.get(child.rank, now)
            if stuck > limit:
                pushed = self.pushed(child.rank)
                deed = "stepped" if self.state.without_servers else "pushed"
                self.say(f"{child} has not {deed} for {stuck:.1f} s (it is at iteration {pushed}): given up")
                del self.moved_s[child.rank]
                child.kill()
