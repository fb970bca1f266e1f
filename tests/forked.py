"""Programs of paceline's and scripts, each in a fork of the test's process, which has imported torch already.

A fresh interpreter takes seconds of processor time for that. Otherwise it is the same: the program has a process,
outputs, a working directory and an environment of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from paceline import cli


class Program:
    """`-m paceline ...` or `script.py ...`, started as if by the interpreter."""

    def __init__(
        self,
        command: Sequence[object],
        out: IO[Any],
        errors: IO[Any],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        umask: int = -1,
    ) -> None:
        self.words = [str(word) for word in command]
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for descriptor, file in enumerate((open(os.devnull), out, errors)):  # noqa: SIM115
                    os.dup2(file.fileno(), descriptor)
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
                if umask >= 0:
                    os.umask(umask)
                if env is not None:
                    os.environ.clear()
                    os.environ.update(env)
                os.chdir(cwd or ".")
                torch.set_num_threads(1)  # the threads of the parent's pools do not exist here
                code = self.exit_code()
                sys.stdout.flush()
            finally:
                os._exit(code)

    def exit_code(self) -> int:
        """Does what the interpreter would, and returns what it would exit with."""
        try:
            if self.words[:2] == ["-m", "paceline"]:
                cli.main(self.words[2:])
            sys.argv = self.words
            sys.path.insert(0, str(Path(self.words[0]).parent))
            runpy.run_path(self.words[0], run_name="__main__")
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(0.005)
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    command: Sequence[object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    umask: int = -1,
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns its exit code and what it has printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        program = Program(command, out, errors, cwd, env, umask)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        printed, said = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, errors))
    return subprocess.CompletedProcess(program.words, code, printed, said)
