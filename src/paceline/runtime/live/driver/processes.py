"""The live processes of a run: started here or on another host, watched, and collected when they end."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from dataclasses import dataclass, field
from pathlib import Path

from paceline.runtime.live.driver.children import Child, WorkerStarter, start_server
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.remote_hosts import RemoteHosts
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.worker_output import WorkerOutput
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.protocol import wire


@dataclass(eq=False)
class Children:
    """The processes that live, by their sentinel."""

    waiter: Waiter
    output: WorkerOutput
    by_sentinel: dict[int, Child] = field(default_factory=dict)

    def values(self) -> ValuesView[Child]:
        return self.by_sentinel.values()

    def workers(self) -> list[Child]:
        return [child for child in self.values() if child.role == "worker"]

    def adopt(self, child: Child) -> None:
        """Watches a process that has been started."""
        self.by_sentinel[child.sentinel] = child
        if child.is_local:
            self.waiter.watch(child.sentinel)
        self.output.listen(child)

    def ended(self, ready: Iterable[object]) -> list[Child]:
        """Returns those that these sentinels belong to."""
        return [self.by_sentinel[each] for each in ready if isinstance(each, int) and each in self.by_sentinel]

    def collect(self, child: Child) -> int:
        """Lets a process go that has ended; returns its exit code, negative if it was killed by that signal."""
        self.by_sentinel.pop(child.sentinel, None)
        if child.is_local:
            self.waiter.forget(child.sentinel)
        code = child.reap()
        self.output.hear_last(child)
        return code

    def dismiss(self, child: Child) -> None:
        """Ends a process that is not needed."""
        del self.by_sentinel[child.sentinel]
        if child.is_local:
            self.waiter.forget(child.sentinel)
        child.kill()
        child.reap()

    def kill_all(self) -> None:
        for child in self.values():
            child.kill()
        for child in self.values():
            child.reap()
        self.by_sentinel.clear()


@dataclass(eq=False)
class ProcessStarter:
    """Starts the processes of a run, where they belong."""

    starter: WorkerStarter
    folder: Path
    hosts: RemoteHosts | None
    children: Children

    def worker(self, rank: int, incarnation: int) -> None:
        if self.hosts is not None:
            self.children.adopt(self.hosts.start_worker(rank, incarnation))
        else:
            self.children.adopt(self.starter.start(rank, incarnation, self.folder))

    def server(self, shard: int, incarnation: int) -> bool:
        """Returns whether there was a place for it."""
        if self.hosts is None or not self.hosts.meeting.spread:
            self.children.adopt(start_server(self.folder, shard, incarnation))
        elif (host := self.hosts.place_server(shard)) is not None:
            self.children.adopt(self.hosts.start(host, "server", shard, incarnation))
        else:
            return False
        return True


@dataclass(eq=False)
class Workers:
    """The workers whose processes live."""

    children: Children
    roster: Roster
    starter: ProcessStarter
    keys: KeyRegistry
    messenger: Messenger
    state: RunState

    def live(self) -> list[Child]:
        return self.children.workers()

    def processes(self) -> tuple[tuple[int, int], ...]:
        """Returns the rank and the incarnation of each."""
        return tuple((child.rank, child.incarnation) for child in self.live())

    def start(self, rank: int) -> None:
        """Starts a process for this rank; it becomes a member when it has described its model."""
        incarnation = self.roster.next_incarnation(rank)
        self.keys.make(rank, incarnation)
        self.starter.worker(rank, incarnation)

    def stop(self, reason: str, ending: str) -> None:
        """Asks all to end after their current step; `ending` is how the run ends, as `Run.ended` says it."""
        self.state.stopping = True
        self.state.ending = ending
        for child in self.live():
            self.messenger.to_worker(child.rank, child.incarnation, wire.Stop(reason))
