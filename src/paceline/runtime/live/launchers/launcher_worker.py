"""What `paceline.init()` does in a process that torchrun or Slurm has started: it becomes a worker of a run.

The first process of each node starts the node's agent as a child, which takes the node's processes for its workers
(`launchers/adopted_processes.py`); rank 0 starts the driver too. From then on everything is as under `paceline run`.
Since no code of paceline runs around the script here, hooks note how it ends: `sys.excepthook`, `sys.exit`, and the
interpreter's end, when the process leaves the run and waits for the children it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

from paceline.errors import PacelineError, RunFailed, printable
from paceline.runtime.live.launchers.adopted_processes import AGENT, left_path, open_process, pid_path, write_pid
from paceline.runtime.live.launchers.launcher_environment import Place
from paceline.runtime.live.launchers.rendezvous import FolderThere, RendezvousStore, poll
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.process_keys import key_path
from paceline.runtime.live.system.process_setup import die_with
from paceline.runtime.live.trainer.run_connection import RunConnection

logger = logging.getLogger(__name__)

PROGRAM = "paceline.commands.launcher_processes"
DRIVE, ATTEND = "drive", "attend"
"""The part that `PROGRAM` is started for: the driver, or a node's agent."""
LOOK_S = 0.02


def start_child(part: str, arguments: list[str], own_session: bool = False) -> subprocess.Popen[bytes]:
    """Starts a process of paceline's own, which ends when this one does."""
    command = [sys.executable, "-m", PROGRAM, part, *arguments]
    # A live table would be written over by what the ranks print.
    environment = {**os.environ, "PACELINE_DRIVER": str(os.getpid()), "TTY_COMPATIBLE": "0", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=own_session)


class LauncherWorker:
    """This process's part in a launcher's run."""

    def __init__(self, place: Place, leave: Callable[[bool], None]) -> None:
        """`leave(well)` closes this process's part in the run when its script ends."""
        self.leave = leave
        self.place = place
        self.pid = os.getpid()
        self.failed = False
        self.leaving = False
        self.joined: Path | None = None
        """The folder of the node's agent, once this process is in the run."""
        self.children: list[subprocess.Popen[bytes]] = []

    def join(self) -> RunConnection:
        """Starts the driver and the agent if this is their process, and joins the run."""
        place = self.place
        die_with(os.getppid(), signal.SIGTERM)  # as all processes of a run: also when the launcher is killed
        self.install_hooks()
        atexit.register(self.finish)
        script = [sys.argv[0] or "script", *sys.argv[1:]]
        # Sessions of their own: the launcher's signals are for the ranks, and the children see to it that all ends.
        if place.rank == 0:
            self.children.append(start_child(DRIVE, script, own_session=True))
        if place.local_rank == 0:
            self.children.append(start_child(ATTEND, script, own_session=True))
        store = RendezvousStore(place, on_wait=self.check)
        folder = Path(store.wait_for(f"folder-{place.node}", FolderThere, self.check).path)
        if not shared_memory.is_run_folder(folder):
            raise RunFailed(f"the store names {printable(str(folder))}, which is no folder of a run on this host")
        write_pid(pid_path(folder, place.rank))
        self.await_file(folder, folder / "config")
        config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        if config.multihost is not None and config.multihost.keys:
            self.await_file(folder, key_path(folder, place.rank, 0))
        self.joined = folder
        threading.Thread(target=self.watch_agent, args=(folder,), daemon=True).start()
        return RunConnection(folder, place.rank, 0)

    def check(self) -> None:
        """Raises `RunFailed` if a child has ended before the run has begun."""
        if any(child.poll() is not None for child in self.children):
            raise RunFailed("the run could not begin: see above")

    def await_file(self, folder: Path, file: Path) -> None:
        """Returns when the file is there and is not empty."""

        def check() -> None:
            self.check()
            if not folder.exists():
                raise RunFailed(f"the agent of node {self.place.node} has ended: see above")

        poll(lambda: (file.exists() and file.stat().st_size) or None, check, interval_s=LOOK_S)

    def watch_agent(self, folder: Path) -> None:
        """Ends this process when the node's agent is gone: nobody would read its messages."""
        try:
            agent = open_process(folder / AGENT)
        except RunFailed:
            return  # the run is over already
        select.select([agent], [], [])
        os.close(agent)
        if not self.leaving:
            logger.warning(f"worker {self.place.rank}: the agent of node {self.place.node} is gone")
            os._exit(1)

    # The end.

    def install_hooks(self) -> None:
        """Has the interpreter note when the script fails, or asks for another exit code than 0."""
        hook, leave = sys.excepthook, sys.exit

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.failed = True
            if isinstance(error, PacelineError):
                logger.warning(f"worker {self.place.rank}: {error}")
            else:
                hook(kind, error, trace)

        def leaves(status: object = None, /) -> NoReturn:
            self.failed = status not in (None, 0)
            leave(status)  # type: ignore[arg-type]

        sys.excepthook = failed
        sys.exit = leaves

    def finish(self) -> None:
        """Leaves the run at the interpreter's end, and, if the script did not fail, waits for the children."""
        if os.getpid() != self.pid:
            return
        self.leaving = True
        try:
            self.leave(not self.failed)
        except BaseException as error:
            logger.warning(f"worker {self.place.rank} could not leave: {error}")
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
