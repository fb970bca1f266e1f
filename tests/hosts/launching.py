"""A launcher (torchrun, srun) as a process of the test, what it says, and what it leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "PACELINE_TEST_MARK"


class Launched:
    """A command with its log, and all processes that come of it, on this machine; a context manager."""

    def __init__(self, command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self.log_path = folder / f"{self.mark}.log"
        self.seen: set[int] = set()
        """Processes that came of it, as far as they were looked for."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: self.mark}
        with self.log_path.open("w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command], cwd=folder, env=environment, text=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def log(self) -> str:
        return self.log_path.read_text()

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 150.0) -> None:
        until = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(f"it did not come about that {what}:\n{self.log()}")
            self.processes()
            time.sleep(0.2)

    def end(self, timeout_s: float = 150.0) -> int:
        """Its exit code, once it has ended."""
        until = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until, f"it did not end within {timeout_s:g} s:\n{self.log()}"
            self.processes()
            time.sleep(0.2)
        return code

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of every process that came of it and is still there, by number."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                pairs = (path / "environ").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            environment = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs if pair)
            if environment.get(MARK) == self.mark and state != "Z":
                found[int(path.name)] = environment
        self.seen.update(found)
        return found

    def shared(self) -> list[str]:
        """Shared memory these processes have."""
        return [path.name for number in self.seen for path in Path("/dev/shm").glob(f"*paceline-{number}-*")]

    def rank(self, rank: int, script: str) -> int:
        """The number of the process that runs the script as this rank of the launcher."""
        for number, environment in self.processes().items():
            command = Path(f"/proc/{number}/cmdline").read_bytes().decode().split("\0")
            if environment.get("RANK") == str(rank) and any(part.endswith(script) for part in command[1:3]):
                return number
        raise AssertionError(f"there is no rank {rank}:\n{self.log()}")

    def leaves_nothing(self, timeout_s: float = 10.0) -> None:
        """All processes end, and no shared memory of theirs stays."""
        until = time.monotonic() + timeout_s
        while (left := self.processes()) or self.shared():
            assert time.monotonic() < until, f"left: {sorted(left)}, {self.shared()}\n{self.log()}"
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.processes():
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
