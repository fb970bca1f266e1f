"""A process that has imported torch and is forked into workers, as it looks to the process that starts workers.

Imports take seconds, a fork takes milliseconds. The process is a fresh interpreter (`START`) that does nothing but
import, in one thread, and fork (`paceline/fork_server_process.py`). The forks are children of whoever asked for them:
watched, collected and ended as any other child, and not touched by the end of the process that they are forks of.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from paceline.runtime.live.system.process_setup import START

SOCKET = "PACELINE_FORK_SERVER"
"""The environment variable with the file descriptor by which a fork server hears its orders."""
PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 120.0
"""How long the imports may take."""
LONGEST = 1 << 17
"""Bytes of a message."""
MOST_PRINTED = 1 << 20
"""Bytes that the imports may print."""
ENDED = "the fork server has ended"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""What keeps numpy from starting threads when it is imported."""


class Preload(msgspec.Struct, tag=True):
    """The order to import these modules besides torch and paceline."""

    modules: tuple[str, ...]


class Fork(msgspec.Struct, tag=True):
    """The order to fork. The pipes for stdout and stderr come with it."""

    parent: int
    """The process number of whoever gives the order."""
    environment: dict[str, str]
    """The variables that differ from those the fork server was started with."""
    removed: tuple[str, ...]
    """The variables that are not to be there."""


class Ready(msgspec.Struct, tag=True):
    """Everything is imported."""


class Forked(msgspec.Struct, tag=True):
    """The process number of the fork."""

    pid: int


class Failed(msgspec.Struct, tag=True):
    """The reason why there are no forks to be had."""

    why: str


Order = Preload | Fork
Answer = Ready | Forked | Failed


class CannotForkError(Exception):
    """The message says why."""


class ForkServer:
    """A fork server for the workers that run one script."""

    def __init__(self, script: Sequence[str], threads: int) -> None:
        """Starts the process, which imports torch. `script` is the script with its arguments; each fork has so many
        threads, unless the environment says how many."""
        self.work = (list(script), threads)
        self.environment = dict(os.environ)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.printed, printing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(printing, True)
        with contextlib.suppress(OSError):
            fcntl.fcntl(printing, fcntl.F_SETPIPE_SZ, MOST_PRINTED)
        own = {SOCKET: str(theirs.fileno()), "PACELINE_DRIVER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *script],
            env={"OMP_NUM_THREADS": str(threads)} | self.environment | ONE_THREAD | own,
            stdin=subprocess.DEVNULL, stdout=printing, stderr=printing, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        os.close(printing)
        self.is_ready = False

    def preload(self, modules: Sequence[str]) -> None:
        """Has it import more modules, and then be ready."""
        with contextlib.suppress(OSError):  # it has died: whoever waits for it hears that
            self.socket.send(msgspec.json.encode(Preload(tuple(modules))))

    def wait(self) -> None:
        """Returns when it can fork; raises `CannotForkError` if it never will."""
        if not self.is_ready:
            self._answer()
            self.is_ready = True

    def fork(self, environment: dict[str, str], outputs: Sequence[int]) -> int:
        """Returns the process number of a fork, a child of this process that runs the script in this environment."""
        self.wait()
        changed = {name: value for name, value in environment.items() if self.environment.get(name) != value}
        order = Fork(os.getpid(), changed, tuple(self.environment.keys() - environment.keys()))
        with _adopting():
            try:
                socket.send_fds(self.socket, [msgspec.json.encode(order)], outputs)
            except ConnectionError:
                raise CannotForkError(ENDED) from None
            except OSError as error:  # the environment is too large for a message
                raise CannotForkError(f"it cannot be told: {error.strerror}") from None
            answer = self._answer()
        assert isinstance(answer, Forked)
        return answer.pid

    def take_printed(self) -> bytes:
        """Returns what it has printed since the last call."""
        try:
            return os.read(self.printed, MOST_PRINTED)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Ends it. Its forks live on."""
        self.socket.close()
        os.close(self.printed)
        self.process.kill()
        self.process.wait()

    def _answer(self) -> Answer:
        try:
            encoded = self.socket.recv(LONGEST)
        except TimeoutError:
            raise CannotForkError(f"its imports take longer than {PATIENCE_S:g} s") from None
        except ConnectionError:
            encoded = b""
        if not encoded:
            raise CannotForkError(ENDED)
        answer: Answer = msgspec.json.decode(encoded, type=Answer)
        if isinstance(answer, Failed):
            raise CannotForkError(answer.why)
        return answer


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Has the kernel make this process the parent of those of its descendants whose own parents end meanwhile."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_SET_CHILD_SUBREAPER + 1, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def threads_of(workers: int) -> int:
    """Returns how many threads each of so many workers on this machine has, if nobody says."""
    return max(1, (os.cpu_count() or 1) // workers)


_early: ForkServer | None = None


@contextlib.contextmanager
def started_early(script: Sequence[str], workers: int) -> Iterator[None]:
    """Starts a fork server for so many workers before anybody asks for it: it imports while this process does."""
    global _early
    _early = ForkServer(script, threads_of(workers))
    try:
        yield
    finally:
        if _early is not None:
            _early.close()
            _early = None


def take_early(script: Sequence[str], threads: int) -> ForkServer | None:
    """Returns the fork server that was started early, if it is for this."""
    global _early
    server, _early = _early, None
    if server is not None and server.work != (list(script), threads):
        server.close()
        return None
    return server
