"""Round trips of a small message between 4 clients and one server: Unix sockets as paceline uses them.

    python benchmarks/control_channel.py [--clients 4] [--seconds 2]

Prints round trips a second of all clients together and the CPU time each costs, both ends together.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter

MESSAGE = b"x" * 100


def unix_server(folder: Path, until: float) -> int:
    listener, waiter = Listener(folder / "unix"), Waiter()
    waiter.watch(listener)
    served = 0
    while time.monotonic() < until:
        waiter.wait(0.1)
        while (received := listener.receive()) is not None:
            listener.send(*received)
            served += 1
    listener.close()
    waiter.close()
    return served


def unix_client(folder: Path, name: bytes) -> None:
    link = Link(folder / "unix", name)
    while not link.gone:
        link.send(MESSAGE)
        link.wait_for(1.0)


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            before = cpu_s()

            def started(number: int, where: Path = Path(folder)) -> None:
                while not any(where.iterdir()):
                    time.sleep(0.01)
                unix_client(where, b"%d" % number)

            pids = [fork(partial(started, number)) for number in range(options.clients)]
            served = unix_server(Path(folder), time.monotonic() + options.seconds)
            for pid in pids:
                os.waitpid(pid, 0)
            cost = (cpu_s() - before) / served
            print(f"{served / options.seconds:,.0f} round trips/s, {1e6 * cost:.0f} us of CPU each")


if __name__ == "__main__":
    main()
