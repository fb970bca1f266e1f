"""The processes that an agent runs on its host: it starts, signals and reaps them, and frees their shared memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from paceline.core.messages import Role
from paceline.runtime.live.driver.children import Child, WorkerStarter, how, start_server
from paceline.runtime.live.driver.worker_output import WorkerOutput
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.peer import parameter_slots
from paceline.runtime.live.protocol import agent_messages
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.file_transfer import MessageRefused
from paceline.runtime.live.storage.process_keys import key_path, write_keys
from paceline.runtime.live.storage.trace_files import SUFFIXES

KEPT_LINES = 30


class LocalProcesses:
    """Workers, which `starter` starts, and servers; `say` gets the lines that they print."""

    def __init__(self, folder: Path, waiter: Waiter, starter: WorkerStarter, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.waiter = waiter
        self.starter = starter
        self.say = say
        self.children: dict[int, Child] = {}
        """The processes that run, by sentinel."""
        self.output = WorkerOutput(waiter, self._say, self._say)
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.failure = ""
        """The end of what the last process that ended has printed, if it failed."""

    def start(self, role: Role, rank: int, incarnation: int, offered: int, with_keys: bool) -> agent_messages.Started:
        """Starts a process, with a key pair of its own if it is a worker; not more of a role than are `offered`."""
        if sum(child.role == role for child in self.children.values()) >= offered:
            raise MessageRefused(f"it starts {role} {rank}, and this host has offered to run {offered}")
        key = ""
        if role == "server":
            child = start_server(self.folder, rank, incarnation)
        else:
            if with_keys:
                key = write_keys(self.folder, rank, incarnation)
            child = self.starter.start(rank, incarnation, self.folder)
        self.children[child.sentinel] = child
        self.waiter.watch(child.sentinel)
        self.output.listen(child)
        return agent_messages.Started(role, rank, incarnation, key)

    def signal(self, order: agent_messages.Signal) -> None:
        for child in self.children.values():
            if (child.role, child.rank, child.incarnation) == (order.role, order.rank, order.incarnation):
                child.signal(order.number)

    def kill(self) -> None:
        for child in self.children.values():
            child.kill()

    def departed(self) -> set[int]:
        """The sentinels of adopted processes that have left the run and live on."""
        return {sentinel for sentinel, child in self.children.items() if child.has_left()}

    def read_output(self, ready: Iterable[object]) -> None:
        self.output.hear_all(ready)

    def ended(self, ready: Collection[object]) -> list[Child]:
        """Removes and returns the processes whose sentinel is ready."""
        return [self.children.pop(sentinel) for sentinel in list(self.children) if sentinel in ready]

    def reap(self, child: Child) -> int:
        """The exit code of a process that has ended."""
        self.waiter.forget(child.sentinel)
        return child.reap()

    def report(self, child: Child, code: int) -> agent_messages.Ended:
        """Cleans up after a process that has ended; what the driver is to know."""
        self.output.hear_last(child)
        self._clean(child, code)
        self.failure = "\n".join(self.last_lines) or f"{child} {how(code)}" if code > 0 else ""
        return agent_messages.Ended(child.role, child.rank, child.incarnation, code, self.failure)

    def traces(self, child: Child) -> list[Path]:
        """The trace files that a process has left."""
        folder, process = self.folder / "trace", f"*-{child.rank}.{child.incarnation}"
        written = [path for suffix in SUFFIXES for path in folder.glob(process + suffix)]
        roles = (child.role, "peer" if child.role == "worker" else child.role)
        return sorted(path for path in written if path.name.startswith(roles))

    def end_all(self) -> None:
        """Kills all processes and cleans up after them."""
        self.kill()
        for child in self.children.values():
            with contextlib.suppress(FileNotFoundError):
                self.waiter.forget(child.sentinel)
            self._clean(child, child.reap() or 1)
        self.children.clear()

    def close(self) -> None:
        self.end_all()
        self.starter.close()
        self.output.close_all()

    def _say(self, line: str) -> None:
        self.last_lines.append(line)
        self.say(line)

    def _clean(self, child: Child, code: int) -> None:
        """Gives back what a process held of this host's memory."""
        if child.role == "worker":
            shared_memory.remove(self.folder, child.rank, child.incarnation)
            key_path(self.folder, child.rank, child.incarnation).unlink(missing_ok=True)
            if code:
                parameter_slots.remove(self.folder, child.rank, child.incarnation)
