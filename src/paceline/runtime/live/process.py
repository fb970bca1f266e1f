"""The first thing a process of a live run does, and how a worker's script is run in one.

Processes die with their driver (the kernel sees to it), leave Ctrl-C and SIGTERM to it, and say goodbye when their
script ends. A script that raises prints its traceback under its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from paceline import session
from paceline.errors import ConfigError, PacelineError

PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0
"""How long a worker that was told to end waits for the driver to end the run."""


class Stopped(SystemExit):
    """Raised by `step` when the driver has ended the run: the target is reached, or somebody pressed Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(0)


def die_with(driver: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send it this signal, when its parent, the driver, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != driver:
        os._exit(1)


def leave_signals_to_the_driver() -> None:
    """Ctrl-C, a job or a service that is ended, a terminal that is closed: these reach every process of a run.

    The driver is told, too, and ends the run in order; a server must be there until it has.
    """
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)


def let_the_driver_end_us() -> None:
    """The same for a worker, but if the driver was not told, and so does not end the run, it ends after a while.

    Not by ignoring them: programs that the script starts would ignore them too, and its forks could not be ended.
    """
    worker = os.getpid()
    told = over = False

    def end(number: int) -> None:
        nonlocal over
        over = True
        os.kill(worker, number)

    def hear(number: int, frame: object) -> None:
        nonlocal told
        if over or os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not told:
            told = True
            grace = threading.Timer(GRACE_S, end, [number])
            grace.daemon = True
            grace.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, hear)


def give_way(processes: int) -> None:
    """Where there are fewer cores than processes, finish what is running before this thread, when it is woken, runs.

    A worker that is woken by its answer would otherwise take the core from the server that has just sent it, or from
    another worker in the midst of its gradient, which then finds the caches full of something else (SCHED_BATCH).
    """
    if processes > len(os.sched_getaffinity(0)) and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def others_run() -> bool:
    """Whether anybody else on this machine runs or would, now: false where the kernel does not tell."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        return int(running) > 1
    except (OSError, IndexError, ValueError):
        return False


def run_worker(rank: int, work: Callable[[], object]) -> int:
    """Do the worker's work in this process; the exit code."""
    code = 0
    try:
        work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except PacelineError as error:
        print(f"worker {rank}: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except BaseException:
        print(f"worker {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
        code = 1
    session.leave(well=code == 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    """`python -m paceline.runtime.live.process SCRIPT ARGUMENTS...`"""
    die_with(int(os.environ["PACELINE_DRIVER"]))
    let_the_driver_end_us()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    rank = int(os.environ["PACELINE_RANK"])
    sys.exit(run_worker(rank, lambda: runpy.run_path(script, run_name="__main__")))


if __name__ == "__main__":
    main()
