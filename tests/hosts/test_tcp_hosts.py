"""Plain TCP between hosts: one that is gone is noticed, whatever was being said; one that is slow is not taken so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.bench.hosts.netns import Host, Hosts

LISTEN = """
import sys, time
from paceline.runtime.live.messaging.remote_links import FRAME, RemoteListener
from paceline.runtime.live.messaging.unix_sockets import Waiter
listener, waiter = RemoteListener("0.0.0.0", (7000, 7000), None), Waiter()
waiter.watch(listener)
print("listening", flush=True)
talks = sys.argv[1] == "talks"
while not (gone := listener.gone()):
    waiter.wait(0.2)
    while (heard := listener.receive()) is not None:
        print("heard", flush=True)
        if talks:
            listener.send(heard[0], b"much", [bytes(FRAME)] * 200)
print(time.monotonic(), flush=True)
listener.close()
"""
"""Tells what it hears, and when it notices that the caller is gone. It talks: two hundred megabytes an answer."""

CALL = """
import sys, time
from paceline.runtime.live.messaging.remote_links import RemoteLink
link = RemoteLink(f"tcp://{sys.argv[1]}:7000", b"0:0", None, "")
link.send(b"hello")
while not link.gone:
    if link.wait_for(2.5) is not None:
        link.send(b"again")
        print("heard", flush=True)
    elif link.is_connected and not link.gone:
        print("still there", flush=True)
print(time.monotonic(), flush=True)
"""
"""Says something, and tells when it notices that the listener is gone."""


@pytest.fixture
def two() -> Iterator[tuple[Host, Host]]:
    with Hosts(2) as hosts:
        yield hosts[0], hosts[1]


@pytest.mark.parametrize("way", ["idle", "talks"])
def test_a_host_that_is_gone_is_missed_by_both_ends(two: tuple[Host, Host], way: str) -> None:
    here, there = two
    listener = here.popen([sys.executable, "-c", LISTEN, way], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "listening\n"
    caller = there.popen([sys.executable, "-c", CALL, here.address], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert listener.stdout.readline() == "heard\n"
    if way == "talks":
        assert "heard\n" in iter(caller.stdout.readline, "")  # and again, from here on
    time.sleep(1.5)
    began = time.monotonic()
    there.cut()
    lines = [line for line in listener.communicate(timeout=30)[0].split() if line != "heard"]
    assert 0.5 < float(lines[-1]) - began < 4.0
    lines = [line for line in caller.communicate(timeout=30)[0].splitlines() if line != "heard"]
    assert 0.5 < float(lines[-1]) - began < 4.0


def test_a_slow_line_that_loses_packets_is_no_end(two: tuple[Host, Host]) -> None:
    here, there = two
    there.slow(delay_ms=20, loss=0.05)
    listener = here.popen([sys.executable, "-c", LISTEN, "idle"], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "listening\n"
    caller = there.popen([sys.executable, "-c", CALL, here.address], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert listener.stdout.readline() == "heard\n"
    assert caller.stdout.readline() == "still there\n"
    assert caller.stdout.readline() == "still there\n"
    caller.kill()
    assert float(listener.communicate(timeout=30)[0].split()[-1]) > 0
