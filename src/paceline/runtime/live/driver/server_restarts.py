"""Servers whose processes have ended: does what the machine orders (`core/control/server_restarts.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from paceline.core.control.server_restarts import (
    AbandonLog,
    CheckpointFound,
    FindCheckpoint,
    RestartServer,
    ServerEnded,
    ServerEvent,
    ServerRestarter,
)
from paceline.core.control.worker_restarts import EndRun
from paceline.errors import RunFailed
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.children import Child, how
from paceline.runtime.live.driver.durability import Durability
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.server_resizing import ServerResizing
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.storage import checkpoint


@dataclass(eq=False)
class ServerRestarts:
    """Tells the machine which servers have ended, and starts those again that it orders."""

    machine: ServerRestarter
    servers: Servers
    state: RunState
    durability: Durability
    checkpointer: Checkpointer | None
    resizing: ServerResizing
    await_finished: Callable[[int], None]
    """Waits a moment for what a server said last, which may be noticed after that it is gone."""
    say: Callable[[str], None]

    def ended(self, child: Child, code: int) -> None:
        """A server's process has ended with this exit code."""
        servers, state, shard, incarnation = self.servers, self.state, child.rank, child.incarnation
        if code == 0 and state.finishing:
            self.await_finished(shard)
        done = shard in servers.finished or (shard, incarnation) in servers.retired
        if not done:
            self.resizing.server_died(str(child))
        configured, logged = shard in servers.configured, shard in self.durability.covered
        given = self.resizing.reslice_for(shard) is not None
        self._deliver(
            ServerEnded(
                shard, incarnation, code, how(code), state.begun, state.finishing, done, configured, logged, given
            )
        )  # fmt: skip

    def _deliver(self, event: ServerEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case FindCheckpoint(shard):
                    self._deliver(CheckpointFound(shard, self._find_checkpoint(shard)))
                case RestartServer(shard, source, why):
                    if source == "start":
                        self.durability.forget(shard)
                    self.say(why)
                    if self.checkpointer is not None:
                        self.checkpointer.server_died(f"server {shard}")
                    self.servers.restart(shard)
                case AbandonLog(shard):
                    raise RunFailed(self.durability.unusable(shard))
                case EndRun(why):
                    raise RunFailed(why)
                case _:
                    assert_never(order)

    def _find_checkpoint(self, shard: int) -> str:
        path = self.checkpointer.newest(self.servers.assignment[shard]) if self.checkpointer is not None else None
        return f"{path}, at {checkpoint.describe(checkpoint.read(path))}" if path is not None else ""
