"""A line between two network devices, in user space, slow, lossy or damaging: what `tc netem` does where there is one.

Every packet that arrives at one device leaves by the other one, later, at a rate, or not at all, in both directions.
It works on whole Ethernet frames, so TCP sees real delay and real loss and answers as it always does: it sends again,
and slows down. Of some packets one bit of what TCP carries is flipped, and the checksum is right nevertheless: that is
what a broken router or network card does. Which packets are lost or damaged is drawn from a seed.

    python line.py DEVICE DEVICE JSON       {"delay_ms": .., "rate_mbit": .. or null, "loss": ..,
                                            "damage": .., "seed": ..}
"""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import select
import socket
import sys
import time

EVERY_PROTOCOL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
HEADER, CHECKSUM_MISSING = 10, 1
"""What the kernel puts before a frame (`virtio_net_hdr`), and the bit in its first byte that says so."""
FRAME = 1 << 17
QUEUE = 1000
"""Packets that wait in one direction; the next one is dropped, as at a router (and as in `netem`)."""


def device(name: str) -> socket.socket:
    """All that arrives at a device. The header before each frame says which checksum is still to be filled in."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    packets.bind((name, EVERY_PROTOCOL))
    packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    packets.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    packets.setblocking(False)
    return packets


def damaged(packet: bytes, chance: random.Random) -> bytes:
    """With one bit of what TCP carries flipped, if it carries something and its checksum is still to be filled in."""
    ip = HEADER + 14
    tcp = ip + 4 * (packet[ip] & 15)
    if len(packet) < tcp + 20 or not packet[0] & CHECKSUM_MISSING or packet[ip - 2 : ip] != b"\x08\0":
        return packet
    begin, end = tcp + 4 * (packet[tcp + 12] >> 4), ip + int.from_bytes(packet[ip + 2 : ip + 4], "big")
    if packet[ip + 9] != socket.IPPROTO_TCP or end <= begin:
        return packet
    spoilt = bytearray(packet)
    spoilt[chance.randrange(begin, end)] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, options: dict[str, float | None]) -> None:
        self.source, self.target = source, target
        self._delay_s = (options["delay_ms"] or 0.0) / 1000
        rate = options["rate_mbit"]
        self._seconds_a_byte = 0.0 if rate is None else 8 / (rate * 1e6)
        self._loss = options["loss"] or 0.0
        self._damage = options["damage"] or 0.0
        self._chance = random.Random(options["seed"])
        self._free_at = 0.0
        self._waiting: list[tuple[float, int, bytes]] = []
        self._taken = 0

    def take(self) -> None:
        """All that has arrived: lose it, or say when it leaves."""
        while True:
            try:
                packet = self.source.recv(FRAME)
            except BlockingIOError:
                return
            if self._chance.random() < self._loss or len(self._waiting) >= QUEUE:
                continue
            if self._chance.random() < self._damage:
                packet = damaged(packet, self._chance)
            self._free_at = max(time.monotonic(), self._free_at) + len(packet) * self._seconds_a_byte
            heapq.heappush(self._waiting, (self._free_at + self._delay_s, self._taken, packet))
            self._taken += 1

    def give(self) -> float | None:
        """Send what is due; seconds until the next one is, None without one."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            # A full or absent device loses the packet, as any other.
            with contextlib.suppress(OSError):
                self.target.send(heapq.heappop(self._waiting)[2])
        return None


def main() -> None:
    one, other = device(sys.argv[1]), device(sys.argv[2])
    options = json.loads(sys.argv[3])
    directions = [Direction(one, other, options), Direction(other, one, options)]
    print("ready", flush=True)
    while True:
        lefts = [left for direction in directions if (left := direction.give()) is not None]
        readable, _, _ = select.select([one, other, sys.stdin], [], [], min(lefts, default=None))
        if sys.stdin in readable:  # the harness has let go of it
            return
        for direction in directions:
            if direction.source in readable:
                direction.take()


if __name__ == "__main__":
    main()
