"""Mutated messages of an enrolled client to a far listener, which reads them as a server does; memory must stay flat.

    python benchmarks/fuzz_remote.py [--messages 100000] [--seed 0]

Prints how many were refused and how many could be read in spite of all, messages a second, and the resident memory
after each tenth. Fails if it grows by more than 10 MB after the first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.core.messages import Handle, Pull, Push
from paceline.runtime.live.messaging.remote_links import RemoteLink, RemoteListener, make_keys
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.protocol import wire

BATCH = 1000
LIMIT_MB = 10.0


class Samples:
    """Valid messages to a shard, spoilt, and what became of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.refused = self.understood = 0
        exchange = wire.Exchange((Push(Handle(3, 1, 7, 6, 4_000_000)), Pull(3, 1, 8)), None, (), "")
        self.valid = [
            wire.encode(exchange),
            wire.encode(wire.Staged(7, 2, 11)),
            wire.encode(wire.Commit(exchange, 2, (3, 4, 11))),
            wire.encode(wire.Exchange((Pull(0, 0, 0, 2),), ({"lr": 0.1},), (1, 2, 300), "not finite")),
            wire.encode(wire.Fetch("state-3")),
        ]

    def mutated(self) -> tuple[bytes, list[bytes]]:
        """A message with some bytes changed, gone, doubled or put in, or only the frames behind it strange."""
        data = bytearray(self.random.choice(self.valid))
        for _ in range(self.random.randrange(4)):
            at = self.random.randrange(len(data) + 1)
            change = self.random.randrange(5)
            if change == 0:
                data[at : at + 1] = self.random.randbytes(1)
            elif change == 1:
                del data[at : at + self.random.randrange(1, 9)]
            elif change == 2:
                data[at:at] = self.random.randbytes(self.random.randrange(1, 9))
            elif change == 3:
                data[at:at] = data[: self.random.randrange(30)]
            else:
                data[at:] = self.random.choice((b"\x91", b"\x81")) * self.random.randrange(2000)  # deeply nested
        frames = [self.random.randbytes(self.random.randrange(100)) for _ in range(self.random.randrange(3))]
        return bytes(data), frames

    def read(self, message: bytes, frames: Sequence[memoryview]) -> None:
        try:
            wire.decode_remote_request(message)
        except wire.BAD_MESSAGE:
            self.refused += 1
        else:
            self.understood += 1
        assert len(frames) < 3


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ours, theirs = make_keys(), make_keys()
    listener, waiter, samples = RemoteListener("127.0.0.1", (0, 0), ours), Waiter(), Samples(options.seed)
    listener.enrol(theirs.public, b"3:1")
    link = RemoteLink(f"tcp://127.0.0.1:{listener.port}", b"3:1", theirs, ours.public)
    waiter.watch(listener)
    waiter.watch(link)
    sent = heard = 0
    grown: list[float] = []
    begin = time.monotonic()
    while heard < options.messages:
        while sent < min(heard + BATCH, options.messages):
            link.send(*samples.mutated())
            sent += 1
        waiter.wait(1.0)
        while (message := listener.receive()) is not None:
            samples.read(*message[1:])
            heard += 1
            if heard % max(1, options.messages // 10) == 0:
                grown.append(resident_mb())
    rate = heard / (time.monotonic() - begin)
    print(f"{samples.refused:,} refused, {samples.understood:,} understood, {rate:,.0f} a second")
    print("resident MB:", ", ".join(f"{each:.1f}" for each in grown))
    link.close()
    listener.close()
    waiter.close()
    if max(grown) - grown[0] > LIMIT_MB:
        raise SystemExit(f"memory grew by {max(grown) - grown[0]:.1f} MB, the limit is {LIMIT_MB} MB")


if __name__ == "__main__":
    main()
