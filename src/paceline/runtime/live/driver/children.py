"""Starting, watching and ending the processes of a live run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.messages import Role
from paceline.runtime.live.server.server import serve
from paceline.runtime.live.system.process_setup import (
    JOINED,
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


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class WorkerStarter:
    """Starts the processes of workers."""

    start: Callable[[int, int, Path], Child]
    """(rank, incarnation, folder) -> the new process."""
    prepare: Callable[[], None] = nothing
    """Returns when `start` takes no longer than it must."""
    close: Callable[[], None] = nothing
    """Ends what there is besides the workers."""


def start_server(folder: Path, shard: int, incarnation: int) -> Child:
    """A server, as a fork of this process: torch is here already, and takes seconds to import again."""
    return fork("server", shard, incarnation, lambda: serve(folder, shard, incarnation))


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
    return Child(role, rank, incarnation, pid, os.pidfd_open(pid), lambda: collect(pid))


def environment_of(rank: int, incarnation: int, folder: Path) -> dict[str, str]:
    return {
        "PACELINE_FOLDER": str(folder),
        "PACELINE_RANK": str(rank),
        "PACELINE_INCARNATION": str(incarnation),
        JOINED: "",  # even if a worker of another run begins this one
    }


def collect(pid: int) -> int:
    """Returns the exit code of a child that has ended, or will."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def how(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"failed with exit code {code}" if code else "ended"
