"""Processes that a launcher has started and a node's agent adopts as its workers.

They meet through files in the agent's folder. A process writes its process number (`pid-RANK`), and when it has left
the run that it is done (`left-RANK`): it may have to live on, for the agent is a child of one of them. Only the parent
of such a process gets its exit code. Here a process that ends without having left has failed.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

from paceline import private_files
from paceline.errors import RunFailed
from paceline.runtime.live.driver.children import Child, WorkerStarter
from paceline.runtime.live.launchers.rendezvous import poll

AGENT = "agent"
"""The name of the file with the agent's own process number."""
LOOK_S = 0.05


def pid_path(folder: Path, rank: int) -> Path:
    return folder / f"pid-{rank}"


def left_path(folder: Path, rank: int) -> Path:
    return folder / f"left-{rank}"


def write_pid(path: Path) -> None:
    """Writes this process's number atomically."""
    private_files.replace(path, str(os.getpid()).encode())


def open_process(path: Path) -> int:
    """Returns a descriptor of the process whose number is in a file. It becomes readable when that ends."""
    try:
        return os.pidfd_open(int(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunFailed(f"the process of {path.name} is not there: {error}") from None


class AdoptedProcess(Child):
    """A worker that the launcher has started."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        sentinel = open_process(pid_path(folder, rank))
        super().__init__("worker", rank, 0, int(pid_path(folder, rank).read_text()), sentinel, self.end)

    def has_left(self) -> bool:
        return left_path(self.folder, self.rank).exists()

    def end(self) -> int:
        """Waits until the process is done or gone, and returns an exit code."""
        while not self.has_left():
            if select.select([self.sentinel], [], [], LOOK_S)[0]:
                return 0 if self.has_left() else 1
        return 0


def adopter() -> WorkerStarter:
    """Makes a starter of workers that takes processes which run already."""

    def adopt(rank: int, incarnation: int, folder: Path) -> Child:
        if incarnation:
            raise RunFailed(f"worker {rank} is not to be had again: its launcher has to start it")
        return AdoptedProcess(folder, rank)

    return WorkerStarter(adopt)


def await_ranks(
    folder: Path, count: int, on_wait: Callable[[], None], on_delay: Callable[[int], None]
) -> tuple[int, ...]:
    """Returns the ranks of the processes when all are there; `on_delay` gets the number of those that are missing."""

    def there() -> list[int]:
        return sorted(int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*"))

    return poll(
        lambda: tuple(found) if len(found := there()) >= count else None,
        on_wait,
        lambda: on_delay(count - len(there())),
        LOOK_S,
    )
