"""The first thing a process of a live run does, and how a worker's script is run in one.

Processes die with their driver, for which the kernel cares, leave Ctrl-C and SIGTERM to it, and tell it when their
script ends. A script that raises prints its traceback under its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, PacelineError

JOINED = "PACELINE_JOINED"
"""The environment variable that tells the processes a worker starts its process number, its rank, and of how many."""
PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGHUP)
START = """import ctypes, os
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(os.environ["PACELINE_DRIVER"]):
    os._exit(1)
from paceline.script_worker import main
main()"""
"""The program of a worker in a fresh interpreter, followed by the script and its arguments: what `die_with` does comes
before all imports, which take seconds in which the driver may be killed."""
GRACE_S = 5.0
"""How long a worker that was told to end waits for the driver to end the run."""


def die_with(driver: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel kill this process, or send it this signal, when its parent, the driver, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != driver:
        os._exit(1)


def leave_signals_to_the_driver() -> None:
    """Ignores the signals of Ctrl-C, of a job or a service that is ended, and of a terminal that is closed.

    They reach every process of a run: the driver, too, which ends the run in order; a server must be there until it
    has.
    """
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)


def let_the_driver_end_us() -> None:
    """Leaves these signals to the driver in a worker, which ends after a while if the driver does not end the run.

    They are not ignored: programs that the script starts would ignore them too, and its forks could not be ended.
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
    """Where there are fewer cores than processes, has what is running finish before this thread, when woken, runs.

    A worker that is woken by its answer would otherwise take the core from the server that has just sent it, or from
    another worker in the midst of its gradient, which then finds the caches full of something else (SCHED_BATCH).
    """
    if processes > len(os.sched_getaffinity(0)) and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def others_run() -> bool:
    """Returns whether another thread on this machine runs or is ready to; False where the kernel does not tell."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        return int(running) > 1
    except (OSError, IndexError, ValueError):
        return False


def run_worker(rank: int, work: Callable[[], object], leave: Callable[[bool], None]) -> int:
    """Does the worker's work in this process and calls `leave(well)`; returns the exit code."""
    code = 0
    try:
        work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        print_failure(f"worker {rank}", error)
        code = 2 if isinstance(error, ConfigError) else 1
    leave(code == 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def print_failure(process: str, error: BaseException) -> None:
    """Prints what ends this process: an error of paceline's in one line, another as Python would."""
    if isinstance(error, PacelineError):
        print(f"{process}: {error}", file=sys.stderr)
    else:
        print(f"{process} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
