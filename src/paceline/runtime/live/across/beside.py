"""What `paceline.init()` does in a process that torchrun or Slurm has started: it becomes a worker of a run.

The first process of each node starts the node's agent as a child, which takes the node's processes for its workers
(`adopting.py`); rank 0 starts the driver too. From then on everything is as under `paceline run`. As nobody stands
around the script here, how it ends is noted where it shows: in `sys.excepthook`, in `sys.exit`, and at the
interpreter's end, where the process says goodbye and waits for the children it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

from paceline import session
from paceline.errors import PacelineError, RunFailed
from paceline.runtime.live.across.abroad import key_path
from paceline.runtime.live.across.adopting import AGENT, left_path, open_process, pid_path, write_pid
from paceline.runtime.live.across.rendezvous import Board, FolderThere, Place
from paceline.runtime.live.configuration import LiveConfig
from paceline.runtime.live.process import die_with
from paceline.runtime.live.worker.worker import LiveWorker

PROGRAM = "paceline.commands.launched"
DRIVE, ATTEND = "drive", "attend"
"""What the program is to be: the driver, or a node's agent."""
LOOK_S = 0.02


def start_child(part: str, arguments: list[str], own_session: bool = False) -> subprocess.Popen[bytes]:
    """A process of paceline's own, which ends when this one does."""
    command = [sys.executable, "-m", PROGRAM, part, *arguments]
    # A live table would be written over by what the ranks print.
    environment = {**os.environ, "PACELINE_DRIVER": str(os.getpid()), "TTY_COMPATIBLE": "0", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=own_session)


class Beside:
    """This process's part in a launcher's run."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pid = os.getpid()
        self.failed = False
        self.leaving = False
        self.joined: Path | None = None
        """The folder of the node, once this process is in."""
        self.children: list[subprocess.Popen[bytes]] = []

    def join(self) -> LiveWorker:
        """Start what is to be started here, and come into the run."""
        place = self.place
        die_with(os.getppid(), signal.SIGTERM)  # as all processes of a run: also when the launcher is killed
        self.note_the_end()
        atexit.register(self.finish)
        script = [sys.argv[0] or "script", *sys.argv[1:]]
        # Sessions of their own: the launcher's signals are for the ranks, and the children see to it that all ends.
        if place.rank == 0:
            self.children.append(start_child(DRIVE, script, own_session=True))
        if place.local_rank == 0:
            self.children.append(start_child(ATTEND, script, own_session=True))
        board = Board(place, still=self.check)
        folder = Path(board.wait_for(f"folder-{place.node}", FolderThere, self.check).path)
        write_pid(pid_path(folder, place.rank))
        self.await_file(folder, folder / "config")
        config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        if config.abroad is not None and config.abroad.keys:
            self.await_file(folder, key_path(folder, place.rank, 0))
        self.joined = folder
        threading.Thread(target=self.mind_the_agent, args=(folder,), daemon=True).start()
        return LiveWorker(folder, place.rank, 0)

    def check(self) -> None:
        """Nothing that was started here may end before the run has begun."""
        if any(child.poll() is not None for child in self.children):
            raise RunFailed("the run could not begin: see above")

    def await_file(self, folder: Path, file: Path) -> None:
        """Return when the file is there and is not empty."""
        while not (file.exists() and file.stat().st_size):
            self.check()
            if not folder.exists():
                raise RunFailed(f"the agent of node {self.place.node} has ended: see above")
            time.sleep(LOOK_S)

    def mind_the_agent(self, folder: Path) -> None:
        """Without the node's agent nobody would ever hear this process: end it."""
        try:
            agent = open_process(folder / AGENT)
        except RunFailed:
            return  # the run is over already
        select.select([agent], [], [])
        os.close(agent)
        if not self.leaving:
            print(f"worker {self.place.rank}: the agent of node {self.place.node} is gone", file=sys.stderr, flush=True)
            os._exit(1)

    # The end.

    def note_the_end(self) -> None:
        """Note when the script fails, or wants another exit code than 0."""
        hook, leave = sys.excepthook, sys.exit

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.failed = True
            if isinstance(error, PacelineError):
                print(f"worker {self.place.rank}: {error}", file=sys.stderr)
            else:
                hook(kind, error, trace)

        def leaves(status: object = None, /) -> NoReturn:
            self.failed = status not in (None, 0)
            leave(status)  # type: ignore[arg-type]

        sys.excepthook = failed
        sys.exit = leaves

    def finish(self) -> None:
        """The interpreter ends: say goodbye, and wait for the children, if all is well. If not, they see it."""
        if os.getpid() != self.pid:
            return
        self.leaving = True
        try:
            session.leave(well=not self.failed)
        except BaseException as error:
            print(f"worker {self.place.rank} could not leave: {error}", file=sys.stderr)
            self.failed = True
        if self.failed or self.joined is None:
            return
        with contextlib.suppress(FileNotFoundError):
            left_path(self.joined, self.place.rank).touch()
        codes = [child.wait() for child in self.children]
        if any(codes):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
