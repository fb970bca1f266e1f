"""Round trips and bytes a second between two processes over loopback TCP, as paceline sends them, plain and with keys.

    python benchmarks/remote_transport.py [--seconds 2] [--megabytes 40]

A round trip is a message of 100 bytes and its answer. Bytes are counted both ways: a push with its gradient as frames,
answered with as many bytes of parameters; both ends copy what they get into memory of their own, as a run does. The
processor time is that of both ends together.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import numpy as np

from paceline.runtime.live.messaging.remote_links import FRAME, KeyPair, RemoteLink, RemoteListener, make_keys
from paceline.runtime.live.messaging.unix_sockets import Waiter

MESSAGE = b"x" * 100
NAME = b"0:0"


class Slice:
    """The memory a gradient or parameters are in."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        whole = memoryview(self.memory)
        self.frames = [whole[at : at + FRAME] for at in range(0, size, FRAME)]

    def fill(self, frames: list[memoryview]) -> None:
        for ours, theirs in zip(self.frames, frames, strict=True):
            ours[:] = theirs


def serve(listener: RemoteListener, size: int) -> None:
    """Answer everything with as much, until the client says that it is done."""
    waiter, parameters = Waiter(), Slice(size)
    waiter.watch(listener)
    while True:
        waiter.wait(1.0)
        while (received := listener.receive()) is not None:
            name, message, frames = received
            if message == b"done":
                listener.send(name, message)
                listener.close()
                waiter.close()
                return
            if frames:
                parameters.fill(frames)
            listener.send(name, message, parameters.frames if frames else ())


def cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def measure(link: RemoteLink, seconds: float, gradient: Slice | None) -> tuple[int, float]:
    """How many exchanges in which time."""
    done, begin = 0, time.monotonic()
    while time.monotonic() < begin + seconds:
        link.send(MESSAGE, () if gradient is None else gradient.frames)
        answer = link.wait_for(10.0)
        assert answer is not None, link.refused
        if gradient is not None:
            gradient.fill(answer[1])
        done += 1
    return done, time.monotonic() - begin


def run(keys: bool, seconds: float, size: int) -> None:
    ours, theirs = (make_keys(), make_keys()) if keys else (None, None)
    for gradient in (None, Slice(size)):
        before_s = cpu_s()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                listener = RemoteListener("127.0.0.1", (0, 0), ours)
                if theirs is not None:
                    listener.enrol(theirs.public, NAME)
                os.write(writing, b"%d" % listener.port)
                serve(listener, size)
            finally:
                os._exit(0)
        link = connect(int(os.read(reading, 10)), ours, theirs)
        count, wall_s = measure(link, seconds, gradient)
        link.send(b"done")
        link.wait_for(10.0)
        link.close()
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        cost_s = (cpu_s() - before_s) / count
        name = "with keys" if keys else "plain    "
        if gradient is None:
            print(f"{name}: {count / wall_s:,.0f} round trips/s, {1e6 * cost_s:.0f} us of processor time each")
        else:
            rate = 2 * size * count / wall_s
            print(f"{name}: {rate / 1e6:,.0f} MB/s, {1e9 * cost_s / (2 * size / 1e6) / 1e6:.2f} ms of it for 1 MB")


def connect(port: int, ours: KeyPair | None, theirs: KeyPair | None) -> RemoteLink:
    return RemoteLink(f"tcp://127.0.0.1:{port}", NAME, theirs, "" if ours is None else ours.public)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--megabytes", type=int, default=40)
    options = parser.parse_args()
    for _ in range(3):
        for keys in (False, True):
            run(keys, options.seconds, options.megabytes * 1_000_000)


if __name__ == "__main__":
    main()
