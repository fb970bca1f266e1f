"""Workers that run a script: forks of a process that has imported torch, or fresh interpreters where that cannot be.

What they print comes through the driver, in pipes. What the imports of the fork server have printed, or why there is
none, is printed by the first worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.runtime.live.driver.children import Child, WorkerStarter, collect, environment_of
from paceline.runtime.live.system import fork_server
from paceline.runtime.live.system.fork_server import CannotForkError, ForkServer
from paceline.runtime.live.system.process_setup import START

Process = tuple[int, Callable[[], int]]
"""Its number, and what collects its exit code."""
PIPE = 1 << 15
"""Bytes that certainly fit into a new pipe."""


def script_starter(
    script: Sequence[str], workers: int, merged: bool = True, preload: Sequence[str] = (), fresh: bool = False
) -> WorkerStarter:
    """Starts workers that run a script with its arguments.

    With `merged` a worker's stdout and stderr are one pipe, in the order in which it prints; else two. `preload` are
    modules to be imported once, besides torch. With `fresh` every worker is an interpreter of its own.
    """
    workers_of = ScriptWorkers(list(script), fork_server.threads_of(workers), merged, tuple(preload), fresh)
    return WorkerStarter(workers_of.start, workers_of.prepare, workers_of.close)


class ScriptWorkers:
    """Starts workers that run a script."""

    def __init__(self, script: list[str], threads: int, merged: bool, preload: tuple[str, ...], fresh: bool) -> None:
        """Each has so many threads, unless the environment says how many."""
        self.script = script
        self.threads = threads
        self.merged = merged
        self.modules = preload
        self.fresh = fresh
        self.news = b""
        """To be printed by the next worker."""
        self.server = None if fresh else fork_server.take_early(script, threads)
        if self.server is not None:
            self.server.preload(preload)

    def start(self, rank: int, incarnation: int, folder: Path) -> Child:
        self.prepare()
        environment = {**os.environ, **environment_of(rank, incarnation, folder)}
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        environment["PYTHONUNBUFFERED"] = "1"
        environment["PACELINE_DRIVER"] = str(os.getpid())
        pipes = [os.pipe() for _ in range(1 if self.merged else 2)]
        outputs, into = zip(*pipes, strict=True)
        try:
            pid, wait = self._fork(environment, into) or self._spawn(environment, into)
        finally:
            for end in into:
                os.close(end)
        return Child("worker", rank, incarnation, pid, os.pidfd_open(pid), wait, outputs)

    def _fork(self, environment: dict[str, str], into: Sequence[int]) -> Process | None:
        """Returns a fork of the fork server, or None if there is none to be had."""
        pid = None
        if self.server is not None:
            try:
                pid = self.server.fork(environment, into)
            except CannotForkError as error:
                self._give_up(error)
        os.write(into[-1], self.news[-PIPE:])
        self.news = b""
        return (pid, lambda: collect(pid)) if pid is not None else None

    def _spawn(self, environment: dict[str, str], into: Sequence[int]) -> Process:
        """Returns a fresh interpreter."""
        command = [sys.executable, "-c", START, *self.script]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=into[0], stderr=into[-1])
        return process.pid, process.wait

    def prepare(self) -> None:
        if self.fresh or (self.server is not None and self.server.is_ready):
            return
        if self.server is None:
            self.server = ForkServer(self.script, self.threads)
            self.server.preload(self.modules)
        try:
            self.server.wait()
        except CannotForkError as error:
            self._give_up(error)
        else:
            self.news = self.server.take_printed()

    def _give_up(self, error: CannotForkError) -> None:
        """Workers are fresh interpreters from now on."""
        if self.server is not None:
            self.news += self.server.take_printed()
        self.news += f"workers are started as fresh interpreters, not as forks: {error}\n".encode()
        self.fresh = True
        self.close()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
