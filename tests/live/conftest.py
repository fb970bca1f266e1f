"""A leak guard around every live test: no process, thread, socket or shared memory may be left behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.listeners import Ear, MakeEar


def children() -> set[int]:
    found = set()
    for stat in [each / "stat" for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def sockets() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:") or "pidfd" in target:
            found.add(target)
    return found


def shared() -> set[str]:
    """Of this process: others may run on the machine."""
    return {path.name for path in Path("/dev/shm").glob(f"paceline-{os.getpid()}-*")}


def threads() -> int:
    return threading.active_count()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = children(), sockets(), shared(), threads()
    yield
    assert children() <= before[0], "a process was left"
    assert sockets() <= before[1], "a socket or a sentinel was left"
    assert shared() <= before[2], "shared memory was left"
    assert threads() <= before[3], "a thread was left"


@pytest.fixture
def make_ear() -> Iterator[MakeEar]:
    """Makes listeners with links that are closed when the test is over, however it ends."""
    with contextlib.ExitStack() as everything:
        yield lambda *given, **more: everything.enter_context(Ear(*given, **more))
