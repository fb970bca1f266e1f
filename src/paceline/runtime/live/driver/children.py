"""Starting, watching and ending the processes of a live run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.messages import Role
from paceline.runtime.live.server.server import serve
from paceline.runtime.live.system.process_setup import (
    JOINED,
    START,
    die_with,
    leave_signals_to_the_driver,
    let_the_driver_end_us,
    print_failure,
)


@dataclass
class Child:
    """A process the driver started. `sentinel` becomes readable the instant it ends, however it ends."""

    role: Role
    rank: int
    incarnation: int
    pid: int
    sentinel: int
    wait: Callable[[], int]
    """Collect the exit code; negative is the signal that killed it."""
    outputs: tuple[int, ...] = ()
    """Pipes with what it prints, if that comes through the driver: all in one, or stdout and stderr."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"

    def signal(self, number: int) -> None:
        """Through the sentinel, so that it can never hit another process with the same number."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def has_left(self) -> bool:
        """Whether it is done although its process is still there."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether the process is on this host, and its sentinel a file descriptor."""
        return True

    def reap(self) -> int:
        code = self.wait()
        os.close(self.sentinel)
        return code


StartWorker = Callable[[int, int, Path], Child]
"""(rank, incarnation, folder) -> the new process."""


def start_server(folder: Path, shard: int, incarnation: int) -> Child:
    """A server, as a fork of this process: torch is here already, and takes seconds to import again."""
    return fork("server", shard, incarnation, lambda: serve(folder, shard, incarnation))


def script_starter(script: str, arguments: list[str], workers: int, merged: bool = True) -> StartWorker:
    """Workers that run a script, each in a fresh interpreter.

    What they print comes through the driver: in one pipe if it is `merged`, in the order in which it was printed; else
    stderr apart.
    """

    def start(rank: int, incarnation: int, folder: Path) -> Child:
        environment = {**os.environ, **environment_of(rank, incarnation, folder)}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        command = [sys.executable, "-c", START, script, *arguments]
        environment["PYTHONUNBUFFERED"] = "1"
        return _spawn("worker", rank, incarnation, command, environment, merged)

    return start


def fork(role: Role, rank: int, incarnation: int, run: Callable[[], int]) -> Child:
    """A fork of this process that does `run` and ends with what it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    driver = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with(driver)
            if role == "server":
                leave_signals_to_the_driver()
            else:
                let_the_driver_end_us()
            # The threads of the parent's pools do not exist here: torch must not wait for them.
            torch.set_num_threads(1)
            # What was here before the fork stays: looking through it again and again would copy its pages.
            gc.freeze()
            code = run()
        except BaseException as error:
            print_failure(f"{role} {rank}", error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Child(role, rank, incarnation, pid, os.pidfd_open(pid), lambda: _collect(pid))


def environment_of(rank: int, incarnation: int, folder: Path) -> dict[str, str]:
    return {
        "PACELINE_FOLDER": str(folder),
        "PACELINE_RANK": str(rank),
        "PACELINE_INCARNATION": str(incarnation),
        JOINED: "",  # even if a worker of another run begins this one
    }


def _spawn(
    role: Role, rank: int, incarnation: int, command: list[str], environment: dict[str, str], merged: bool
) -> Child:
    environment["PACELINE_DRIVER"] = str(os.getpid())
    pipes = [os.pipe() for _ in range(1 if merged else 2)]
    outputs, into = zip(*pipes, strict=True)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=into[0], stderr=into[-1])
    for end in into:
        os.close(end)
    return Child(role, rank, incarnation, process.pid, os.pidfd_open(process.pid), process.wait, outputs)


def _collect(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def how(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"failed with exit code {code}" if code else "ended"
