"""A node's agent beside processes that a launcher has started: it takes them for its workers.

They meet in the agent's folder, through files. A process says which number it has (`pid-RANK`), and after it has left
the run that it is done (`left-RANK`): it may have to live on, for the agent is a child of one of them. How such a
process ends only its parent is told. Here one that is gone without a word has failed.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import RunFailed
from paceline.runtime.live.driver.children import Child, StartWorker

AGENT = "agent"
"""A file of the folder: the agent's own number."""
LOOK_S = 0.05


def pid_path(folder: Path, rank: int) -> Path:
    return folder / f"pid-{rank}"


def left_path(folder: Path, rank: int) -> Path:
    return folder / f"left-{rank}"


def write_pid(path: Path) -> None:
    """Say which process this is; whoever finds the file finds all of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(str(os.getpid()))
    part.replace(path)


def open_process(path: Path) -> int:
    """A descriptor of the process that has said so; it becomes readable when that has ended."""
    try:
        return os.pidfd_open(int(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunFailed(f"the process of {path.name} is not there: {error}") from None


class Adopted(Child):
    """A worker that somebody else has started."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        sentinel = open_process(pid_path(folder, rank))
        super().__init__("worker", rank, 0, int(pid_path(folder, rank).read_text()), sentinel, self.end)

    def has_left(self) -> bool:
        return left_path(self.folder, self.rank).exists()

    def end(self) -> int:
        """Wait until it is done or gone; whether well."""
        while not self.has_left():
            if select.select([self.sentinel], [], [], LOOK_S)[0]:
                return 0 if self.has_left() else 1
        return 0


def adopter() -> StartWorker:
    """Workers that are there already."""

    def adopt(rank: int, incarnation: int, folder: Path) -> Child:
        if incarnation:
            raise RunFailed(f"worker {rank} is not to be had again: its launcher has to start it")
        return Adopted(folder, rank)

    return adopt


def await_ranks(
    folder: Path, count: int, still: Callable[[], None], tell: Callable[[int], None], tell_s: float
) -> tuple[int, ...]:
    """Who is there, when so many are. Meanwhile `still` is called; `tell` is told how many are missing if it lasts."""
    began, told = time.monotonic(), False
    while len(found := sorted(int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*"))) < count:
        if not told and time.monotonic() - began > tell_s:
            told = True
            tell(count - len(found))
        still()
        time.sleep(LOOK_S)
    return tuple(found)
