"""What the agents of other hosts report of the processes they run: they start, say something, leave files, end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from paceline.core.machine import IllegalEvent
from paceline.errors import ConfigError, PacelineError, printable
from paceline.runtime.live.driver import agent_validation
from paceline.runtime.live.driver.admission import Admission
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.host_arrivals import HostArrivals
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.remote_hosts import RemoteHost
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.messaging.keys import is_key
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.storage import file_transfer, shared_memory
from paceline.runtime.live.storage.file_transfer import MessageRefused


@dataclass(eq=False)
class AgentReports:
    """Has the driver hear what agents report, if it is of processes they run."""

    folder: Path
    arrivals: HostArrivals
    state: RunState
    keys: KeyRegistry
    servers: Servers
    checkpointer: Checkpointer | None
    admission: Admission
    hear: Callable[[wire.ToDriver], None]
    """Takes what a process says to the driver."""
    ended: Callable[[Child], None]
    """Takes a process that has ended."""
    say: Callable[[str], None]

    def take(self, host: RemoteHost, message: agent_messages.FromAgent, frames: list[memoryview]) -> None:
        match message:
            case agent_messages.Ping() | agent_messages.Arrive():
                pass
            case agent_messages.Started():
                self._take_started(host, message)
            case agent_messages.Piece():
                agent_validation.check_file(host, message.file, message.size, self.state.begun)
                content = frames[0] if frames else b""
                file_transfer.unpack(self.folder, message.file, message.offset, message.size, content)
            case agent_messages.Said():
                self._take_said(host, message)
            case agent_messages.Goodbye():
                self.say(f"{host} has left")
                self.arrivals.forget(host)
            case agent_messages.Ended():
                child = host.children.pop((message.role, message.rank, message.incarnation), None)
                if child is not None:
                    child.code = message.code
                    host.last_code = message.code
                    if message.last_words:
                        self.say(printable(message.last_words))
                    self.ended(child)
                    self.arrivals.consider_dismissing(host)
            case _:
                assert_never(message)

    def _take_started(self, host: RemoteHost, started: agent_messages.Started) -> None:
        """A process was started, with this key: a worker's, of this host, and nobody else's."""
        process = (started.rank, started.incarnation)
        if (started.role, *process) not in host.children:
            raise MessageRefused(f"{host} has no {started.role} {started.rank}")
        if started.key and started.role == "worker":
            known = self.keys.known
            if not is_key(started.key) or any(key == started.key and who != process for who, key in known.items()):
                raise MessageRefused(f"the key of worker {started.rank} is none, or somebody else's")
            self.keys.enrol(*process, started.key)

    def _take_said(self, host: RemoteHost, said: agent_messages.Said) -> None:
        """A process of the host speaks to the driver: only for itself."""
        message = agent_validation.read_said(host, said)
        match message:
            case wire.Saved() if self.checkpointer is not None and self.checkpointer.under_way is not None:
                message = file_transfer.unpack_checkpoint(message, self.folder, self.checkpointer.under_way)
            case wire.Finished(shard):
                self._join_vectors(shard)
            case wire.Describe():
                try:
                    agent_validation.check_described(message)
                except ConfigError as error:
                    self.admission.turn_away(message.rank, message.incarnation, str(error))
                    return
        try:
            self.hear(message)
        except (ConfigError, IllegalEvent) as error:
            raise MessageRefused(str(error)) from None

    def _join_vectors(self, shard: int) -> None:
        """A server of another host has left the whole vectors: its own part of them counts."""
        if not self.state.configured or shard >= len(self.servers.assignment):
            raise MessageRefused(f"server {shard} cannot have finished")
        layout, part = self.state.model.layout, self.servers.assignment[shard]
        for name in (shared_memory.WHOLE, shared_memory.AVERAGE):
            path = self.folder / file_transfer.OF_SHARD.format(shard=shard, name=name)
            if path.exists():
                try:
                    theirs = shared_memory.attach(path, layout)
                except PacelineError as error:
                    raise MessageRefused(str(error)) from None
                ours = shared_memory.attach(self.folder / name, layout)
                for start, stop in part:
                    ours[start:stop] = theirs[start:stop]
                path.unlink()
