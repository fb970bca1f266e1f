"""The process that workers are forks of: it imports torch, paceline and what else is named, and forks when told to.

A fork must find what a fresh interpreter would, but for the imported modules. So nothing here starts a thread, touches
a GPU or draws a random number, and what a fork shares with its parent by accident is made its own (`_be_a_worker`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.runtime.live.system.fork_server import (
    LONGEST,
    ONE_THREAD,
    Answer,
    Failed,
    Fork,
    Forked,
    Order,
    Preload,
    Ready,
)
from paceline.runtime.live.system.process_setup import ENDING, die_with, leave_signals_to_the_driver

OWN = (
    "paceline.optim",
    "paceline.sampling",
    "paceline.session",
    "paceline.runtime.live.peer.startup",
    "paceline.runtime.live.trainer.run_connection",
    "paceline.runtime.live.worker.startup",
    "torch.utils.data",
)
"""What workers of all scripts import."""
GPUS = "/dev/nvidia"
OPENBLAS = [f"{kind}openblas_set_num_threads{suffix}" for kind in ("", "scipy_") for suffix in ("", "64_")]


class CannotPreloadError(Exception):
    """The message says why no worker can be a fork of this process."""


def serve(number: int) -> None:
    """Takes orders from this file descriptor. Returns in each fork; the process itself ends with the connection."""
    connection = socket.socket(fileno=number)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    leave_signals_to_the_driver()
    try:
        preload("torch")
        order, _ = _hear(connection)
        assert isinstance(order, Preload)
        for module in (*OWN, *order.modules):
            preload(module)
    except CannotPreloadError as error:
        _say(connection, Failed(str(error)))
        os._exit(1)
    # What is here stays: looking through it again and again would copy its pages in every fork.
    gc.collect()
    gc.freeze()
    _say(connection, Ready())
    while True:
        order, pipes = _hear(connection)
        assert isinstance(order, Fork)
        if _fork_for(order.parent, connection):
            break
        for pipe in pipes:
            os.close(pipe)
    connection.close()
    os.dup2(pipes[0], 1)
    os.dup2(pipes[-1], 2)
    for pipe in pipes:
        os.close(pipe)
    _be_a_worker(order, before)


def _hear(connection: socket.socket) -> tuple[Order, list[int]]:
    encoded, pipes, _, _ = socket.recv_fds(connection, LONGEST, 2)
    if not encoded:
        os._exit(0)
    order: Order = msgspec.json.decode(encoded, type=Order)
    return order, pipes


def _say(connection: socket.socket, answer: Answer) -> None:
    try:
        connection.send(msgspec.json.encode(answer))
    except OSError:
        os._exit(0)


def preload(module: str) -> None:
    """Imports a module; raises `CannotPreloadError` if this process cannot be forked into workers then."""
    try:
        importlib.import_module(module)
        if module == "torch":
            import torch

            torch.optim.SGD([torch.zeros(1)], lr=0.0)  # the first optimizer has torch import half of itself
    except BaseException as error:
        raise CannotPreloadError(f"importing {module} failed: {type(error).__name__}: {error}") from None
    if len(os.listdir("/proc/self/task")) > 1:
        raise CannotPreloadError(f"importing {module} starts threads")
    if any(_leads_to(descriptor).startswith(GPUS) for descriptor in Path("/proc/self/fd").iterdir()):
        raise CannotPreloadError(f"importing {module} uses a GPU")


def _leads_to(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


def _fork_for(parent: int, connection: socket.socket) -> bool:
    """Forks, so that `parent` has a new child; returns whether this is the fork.

    The fork is made by a process between, which ends: then the kernel gives it to `parent`, which adopts orphans.
    """
    reading, writing = os.pipe()
    pid = b""
    with contextlib.suppress(OSError):
        if (between := os.fork()) == 0:
            _fork_and_end(writing)
            os.close(reading)
            die_with(parent)
            return True
        os.close(writing)
        os.waitpid(between, 0)
        pid = os.read(reading, 32)
    os.close(reading)
    _say(connection, Forked(int(pid)) if pid else Failed("there is no memory, or no process number, for a fork"))
    return False


def _fork_and_end(writing: int) -> None:
    """Forks, writes the number of the fork to a pipe and ends; returns in the fork when that has happened."""
    between = os.getpid()
    try:
        if (worker := os.fork()) == 0:
            os.close(writing)
            while os.getppid() == between:
                time.sleep(0.0005)
            return
        os.write(writing, str(worker).encode())
    finally:
        if os.getpid() == between:
            os._exit(0)


def _be_a_worker(order: Fork, signals: Mapping[signal.Signals, Any]) -> None:
    """Makes of a fork what a fresh interpreter with these variables would be."""
    import torch

    for name in (*ONE_THREAD, *order.removed):
        os.environ.pop(name, None)
    os.environ.update(order.environment)
    for number, handler in signals.items():
        signal.signal(number, handler)
    multiprocessing.current_process().authkey = os.urandom(32)
    torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    _wake_openblas(os.environ)


def _wake_openblas(environment: Mapping[str, str]) -> None:
    """Lets OpenBLAS have as many threads as it would take by these variables."""
    wanted = environment.get("OPENBLAS_NUM_THREADS") or environment.get("OMP_NUM_THREADS", "")
    count = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0))
    if count == 1:
        return
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    for path in loaded:
        library = ctypes.CDLL(path)
        for name in OPENBLAS:
            if hasattr(library, name):
                getattr(library, name)(count)
