"""`paceline bench exchange --transport tcp`: the exchange as between hosts, over TCP on this machine's loopback.

paceline's workers keep off the server's shared memory; torch RPC is held to TCP; Ray has its server on a node of its
own. The floor is the bytes that must travel (a gradient there, parameters back) over what one connection between two
processes carries, measured in the same run: a server is one process, so it takes at most that. It knows nothing of
copies before and after, of applying the gradient, of ciphers.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.bench.exchange import Row, counts, measure_paceline, peers_in_asp
from paceline.bench.rounds import in_turn
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.tensors import wire_precision

LOOPBACK = "127.0.0.1"
WAYS = (("float32", False), ("float32", True), ("bfloat16", False))
"""The ways in which paceline is measured: how floats are sent, and whether with keys."""


def run(sizes: list[int], workers: int, rounds: int, optimizer: str, say: Callable[[str], None]) -> list[Row]:
    """Measures rows of each size in the order of `WAYS`, all beside the same rounds of the competitors."""
    rows = []
    for params in sizes:
        options = {**counts(params), "transport": "tcp", "optimizer": optimizer}
        rows += _rows(params, workers, rounds, options, say)
    return rows


def _rows(params: int, workers: int, rounds: int, options: dict[str, Any], say: Callable[[str], None]) -> list[Row]:
    def told(number: int, found: dict[str, list[float]]) -> None:
        bandwidths.append(loopback_bandwidth())
        say(
            f"tcp {params:.0e} round {number}/{rounds}: "
            + ", ".join(f"{n} {rates[-1]:.4g}" for n, rates in found.items())
        )

    def measure(wire: str, keys: bool) -> float:
        multihost = MultihostOptions(LOOPBACK, "", keys=keys, wire=wire, shared_memory=False)
        return measure_paceline("asp", workers, options, multihost)[0]

    bandwidths: list[float] = []
    ours = {f"paceline {_name(*way)}": partial(measure, *way) for way in WAYS}
    found = in_turn({**ours, **peers_in_asp(workers, options)}, rounds, told)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    values = [medians.pop(name) for name in ours]
    rows = []
    for (wire, keys), value in zip(WAYS, values, strict=True):
        floor, ratio = (
            max(bandwidths) / (2 * wire_precision.bytes_per_float(wire) * params),
            value / max(medians.values()),
        )
        beside = (value, "pushes/s", medians, ratio, floor, None, None)
        rows.append(Row("asp", options["optimizer"], params, workers, "tcp", wire, keys, *beside))
    return rows


def _name(wire: str, keys: bool) -> str:
    return f"{wire} with keys" if keys else wire


def cost_of_keys(rows: list[Row]) -> list[str]:
    """Says, in a line for each size, what encryption costs."""
    lines = []
    for plain in rows:
        for keyed in rows:
            if (keyed.params, keyed.wire, keyed.keys, plain.keys) == (plain.params, plain.wire, True, False):
                more_us = 1e6 * (1 / keyed.paceline - 1 / plain.paceline)
                more = plain.paceline / keyed.paceline - 1
                lines.append(f"keys at {plain.params:.0e}: {more_us:+.0f} us a push, {more:+.0%} time")
    return lines


def loopback_bandwidth(nbytes: int = 1 << 28) -> float:
    """Returns the bytes a second over one TCP connection between two processes of this machine."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        sender = os.fork()
        if sender == 0:
            try:
                with socket.create_connection(listener.getsockname()) as connection:
                    piece = bytes(1 << 20)
                    for _ in range(2 * nbytes >> 20):
                        connection.sendall(piece)
            finally:
                os._exit(0)
        try:
            connection, _ = listener.accept()
            with connection:
                _receive(connection, nbytes)  # warm: windows and buffers have grown
                began = time.perf_counter()
                _receive(connection, nbytes)
                return nbytes / (time.perf_counter() - began)
        finally:
            os.waitpid(sender, 0)


def _receive(connection: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(1 << 20))
    left = nbytes
    while left > 0:
        left -= connection.recv_into(buffer[:left])
