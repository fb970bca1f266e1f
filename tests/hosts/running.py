"""A run over several hosts: `paceline serve` on the first, `paceline join` on the others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from paceline import run_folder
from paceline.bench.hosts.netns import Host, Process
from paceline.run import Run

JOB = Path(__file__).parent / "job.py"
FORKS = Path(__file__).parent / "forks.py"
PORT = 7000


class Serving:
    """A run that is served on `host`, with its folder, its key and its logs in `folder`; a context manager."""

    def __init__(self, host: Host, folder: Path, *options: str, insecure: bool = False) -> None:
        self.host = host
        self.folder = folder
        self.options = options
        self.insecure = insecure
        self.processes: list[tuple[str, Process, Path]] = []

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def key(self) -> Path:
        return self.folder / "run.key"

    @property
    def address(self) -> str:
        return f"tcp://{self.host.address}:{PORT}"

    def __enter__(self) -> Self:
        keys = ("--insecure",) if self.insecure else ("--key-file", str(self.key))
        bind = ("--bind", f"tcp://{self.host.address}:{PORT}", *keys, "--dir", str(self.out))
        self.server = self.start(self.host, "serve", "-m", "paceline", "serve", *bind, *self.options)
        self.until(lambda: "waiting for" in self.log("serve"), "the run is served")
        return self

    def start(self, host: Host, name: str, *arguments: str) -> Process:
        """Start Python on a host, with a log of this name."""
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            process = host.popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT)
        self.processes.append((name, process, log))
        return process

    def join(self, host: Host, name: str, workers: int, script: Sequence[str], *options: str) -> Process:
        """Have `host` take part with so many workers."""
        key = ("--key-file", str(self.key), "--workers", str(workers))
        return self.start(host, name, "-m", "paceline", "join", self.address, *key, *options, *script)

    def fork(self, host: Host, name: str, workers: int, iterations: int) -> Process:
        """The same with workers that are forks, which start sooner: digits."""
        job = ("digits-mlp", "sgd:lr=0.1", "32", str(iterations))
        return self.start(host, name, str(FORKS), self.address if self.insecure else str(self.key), str(workers), *job)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{log.read_text()}" for name, _, log in self.processes)

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        until = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > until or self.server.poll() not in (None, 0):
                raise AssertionError(f"it did not come about that {what}:\n{self.logs()}")
            time.sleep(0.02)

    def end(self, timeout_s: float = 120.0) -> Run:
        """Wait until all have ended well; what the run left."""
        until = time.monotonic() + timeout_s
        for name, process, _ in self.processes:
            try:
                code = process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end:\n{self.logs()}") from None
            assert code == 0, f"{name} ended with {code}:\n{self.logs()}"
        return run_folder.load(self.out)

    def __exit__(self, *_: object) -> None:
        for _, process, _ in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)


def job(
    workload: str = "digits-mlp", optimizer: str = "sgd:lr=0.1", batch: int | str = 32, iterations: int = 100
) -> list[str]:
    """The script and its arguments."""
    return [str(JOB), workload, optimizer, str(batch), str(iterations)]
