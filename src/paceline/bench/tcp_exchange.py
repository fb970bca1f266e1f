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
from typing import Any

from paceline.bench import peers
from paceline.bench.exchange import Row, counts, measure_paceline
from paceline.runtime.live.configuration import Abroad
from paceline.tensors import halves

LOOPBACK = "127.0.0.1"
WAYS = (("float32", False), ("float32", True), ("bfloat16", False))
"""What paceline is measured with: how floats travel, and whether with keys."""
ITEMSIZE = {"float32": 4, **{name: dtype.itemsize for name, dtype in halves.HALVES.items()}}


def run(sizes: list[int], workers: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Rows of each size in the order of `WAYS`, all beside the same rounds of the peers."""
    rows = []
    for params in sizes:
        options = {**counts(params), "transport": "tcp"}
        rows += _rows(params, workers, rounds, options, say)
    return rows


def _rows(params: int, workers: int, rounds: int, options: dict[str, Any], say: Callable[[str], None]) -> list[Row]:
    ours: dict[tuple[str, bool], list[float]] = {way: [] for way in WAYS}
    theirs: dict[str, list[float]] = {}
    bandwidths = []
    for number in range(rounds):
        bandwidths.append(loopback_bandwidth())
        for wire, keys in WAYS:
            abroad = Abroad(LOOPBACK, "", keys=keys, wire=wire, near=False)
            ours[wire, keys].append(measure_paceline("asp", workers, options, abroad)[0])
        for name, rate in _measure_peers(workers, options).items():
            theirs.setdefault(name, []).append(rate)
        mine = ", ".join(f"{_name(*way)} {rates[-1]:.4g}" for way, rates in ours.items())
        latest = ", ".join(f"{name} {rates[-1]:.4g}" for name, rates in theirs.items())
        say(f"tcp {params:.0e} round {number + 1}/{rounds}: paceline {mine}; {latest}")
    medians = {name: statistics.median(rates) for name, rates in theirs.items()}
    best = max(medians.values())
    bandwidth = max(bandwidths)
    rows = []
    for wire, keys in WAYS:
        value = statistics.median(ours[wire, keys])
        floor = bandwidth / (2 * ITEMSIZE[wire] * params)
        rows.append(
            Row("asp", params, workers, "tcp", wire, keys, value, "pushes/s", medians, value / best, floor, None, None)
        )
    return rows


def _measure_peers(workers: int, options: dict[str, Any]) -> dict[str, float]:
    measured = {"torch_rpc": sum(peers.measure("rpc", workers + 1, options))}
    if peers.has_ray():
        measured["ray"] = peers.measure("ray", workers, options)[0]
    return measured


def _name(wire: str, keys: bool) -> str:
    return f"{wire} with keys" if keys else wire


def cost_of_keys(rows: list[Row]) -> list[str]:
    """What CURVE costs, in words: a line for each size."""
    lines = []
    for plain in rows:
        for keyed in rows:
            if (keyed.params, keyed.wire, keyed.keys, plain.keys) == (plain.params, plain.wire, True, False):
                more_us = 1e6 * (1 / keyed.paceline - 1 / plain.paceline)
                more = plain.paceline / keyed.paceline - 1
                lines.append(f"CURVE at {plain.params:.0e}: {more_us:+.0f} us a push, {more:+.0%} time")
    return lines


def loopback_bandwidth(nbytes: int = 1 << 28) -> float:
    """Bytes a second over one TCP connection between two processes of this machine."""
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
