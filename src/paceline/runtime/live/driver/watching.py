"""Watching a live run: how the workers come along, who is stuck, who is missing, whether time is up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from paceline.errors import RunFailed
from paceline.runtime.live import wire
from paceline.tensors.steppers import Hyper

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

SERVERS_READY_S = 60.0
MISSING_S = 20.0
FEW = 3
"""Rejected gradients that are told one by one."""


@dataclass(frozen=True)
class Care:
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


class Watchman:
    """What the driver knows of the workers between their pushes."""

    def __init__(self, driver: Driver, care: Care) -> None:
        self.driver = driver
        self.care = care
        self.status: dict[int, wire.WorkerStatus] = {}
        """How the workers look from shard 0."""
        self.hyper: tuple[Hyper, ...] | None = None
        """What schedulers have changed the hyper-parameters to."""
        self.moved_s: dict[int, float] = {}
        """When each worker's push was last seen."""
        self.started = time.monotonic()
        self.told_missing = False
        self.rejected = 0
        self.interrupted_s: float | None = None

    def tick(self) -> None:
        self.check_time()
        self.check_progress()

    def take_status(self, status: wire.Status) -> None:
        now = time.monotonic()
        if status.shard:
            self.moved_s.update((rank, now) for rank, seen in status.workers.items() if seen.waits)
            return
        scheduling = self.driver.scheduling
        held = scheduling.waits if scheduling is not None else {}
        workers = {
            rank: structs.replace(seen, waits=seen.waits or held.get(rank, "")) for rank, seen in status.workers.items()
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

    def take_rejected(self, message: wire.Rejected) -> None:
        """The first few, then every tenth, hundredth, ...: a model that has diverged has no others."""
        self.rejected += 1
        which = f"of worker {message.worker}, iteration {message.iteration}: {message.reason}"
        if self.rejected <= FEW:
            self.driver.say(f"rejected the gradient {which}")
        elif self.rejected % 10 ** max(1, len(str(self.rejected)) - 1) == 0:
            self.driver.say(f"rejected {self.rejected} gradients so far, the last one {which}")

    def forget(self, rank: int) -> None:
        """Its process has ended; another may come."""
        self.status.pop(rank, None)
        self.moved_s.pop(rank, None)

    def check_progress(self) -> None:
        """Give up workers that are alive but stuck."""
        limit = self.care.hang_timeout_s
        if limit is None or not self.driver.begun:
            return
        members = self.driver.authority.members
        for child in self.driver.live_workers():
            process = (child.rank, child.incarnation)
            if members.get(child.rank) != child.incarnation or process in self.driver.peers.done:
                continue  # not in yet, or done: its process is only on its way out
            stuck = time.monotonic() - self.moved_s.get(child.rank, time.monotonic())
            if stuck > limit:
                pushed = self.status[child.rank].pushed if child.rank in self.status else 0
                deed = "stepped" if self.driver.peers.active else "pushed"
                self.driver.say(f"{child} has not {deed} for {stuck:.1f} s (it is at iteration {pushed}): given up")
                del self.moved_s[child.rank]
                child.kill()

    def check_time(self) -> None:
        waited = time.monotonic() - self.started
        limit = self.care.timeout_s
        if limit is not None and waited > limit:
            raise RunFailed(f"the run did not end within {limit:g} s")
        if self.driver.interrupts and self.care.grace_s is not None:
            self.interrupted_s = self.interrupted_s or time.monotonic()
            if time.monotonic() - self.interrupted_s > self.care.grace_s:
                raise RunFailed(f"the run was interrupted, and did not end within {self.care.grace_s:g} s")
        there, wanted = self.driver.servers.there, self.driver.servers.count
        if not self.driver.begun and len(there) < wanted and waited > SERVERS_READY_S and self.driver.hosts is None:
            missing = min(set(range(wanted)) - there)
            raise RunFailed(f"server {missing} did not start within {SERVERS_READY_S:g} s")

    def tell_missing(self, missing: list[str]) -> None:
        """Say once who keeps the run from beginning."""
        if missing and not self.told_missing and time.monotonic() - self.started > MISSING_S:
            self.told_missing = True
            self.driver.say(f"still waiting for {', '.join(missing)} to make a paceline.Optimizer")
