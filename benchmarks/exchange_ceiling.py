"""What an exchange through shared memory costs at least on this machine: its passes over memory, and nothing else.

    python benchmarks/exchange_ceiling.py --params 1000000 [--mode bsp|turns]

With (workers + 2) x P floats of memory a push takes two passes: the worker copies its gradient into its segment and
looks whether it is finite, the server steps on it and writes the new parameters back into the segment. Here one process
does nothing but the first, over the segments of four workers in turn, and another nothing but the second, with the
calls that paceline uses; each has a core. There are no messages, no machines, no waiting.
Two cores that share all the work of a push cannot do more pushes a second than two over the sum of both times; a server
that steps on several pushes at once (`server/push_batching.py`) can do a little more.

With `--mode bsp`, two processes share the passes of one iteration of four workers: each copies and looks at two
gradients, then steps one half of the parameters on their mean and writes them back into the four segments; they wait
for each other after each part: with the parameters written back into every segment, and with all models views of the
server's one vector, as under BSP.

With `--mode turns`, nobody copies: two processes, each two workers, look at a gradient and then make the next version
of the parameters out of the last one, by turns, in a pool of vectors. There is no server that could do it for a worker
that is slow or stopped.

`paceline bench exchange` prints what the whole exchange does.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import time

import torch

from paceline.runtime.live.worker.host_copies import AROUND
from paceline.tensors.fused_kernels import copy_and_check_finite, is_finite
from paceline.tensors.layout import layout_of
from paceline.tensors.optimizers import parse
from paceline.tensors.shard_optimizer import PIECE, ShardOptimizer

WORKERS = 4


def shared(params: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 4 * params), dtype=torch.float32)


def serve(segments: list[torch.Tensor], seconds: float) -> float:
    params = len(segments[0])
    values = torch.zeros(params)
    layout = layout_of([("weight", values, 0)])
    optimizer = ShardOptimizer(layout, slice(0, params), values, parse("sgd:lr=0.1"))
    pieces = [optimizer.cut(segment) for segment in segments]
    return seconds_each(lambda turn: optimizer.apply([pieces[turn]], 0.25, (), [pieces[turn]]), seconds)


def work(segments: list[torch.Tensor], seconds: float) -> float:
    gradients, around = [torch.full_like(segment, 1e-6) for segment in segments], len(segments[0]) >= AROUND
    return seconds_each(lambda turn: copy_and_check_finite(gradients[turn], segments[turn], around), seconds)


def iterate(segments: list[torch.Tensor], one_vector: bool, iterations: int) -> float:
    """Seconds of an iteration under BSP."""
    params = len(segments[0])
    vector = shared(params)
    ours, theirs = socket.socketpair()
    child = os.fork()
    mine = theirs if child == 0 else ours
    first, half = (0, slice(0, params // 2)) if child else (2, slice(params // 2, params))
    values = vector[half] if one_vector else vector[half].clone()
    layout = layout_of([("weight", values, 0)])
    optimizer = ShardOptimizer(layout, slice(0, len(values)), values, parse("sgd:lr=0.1"))
    pieces = [optimizer.cut(segment[half]) for segment in segments]
    gradients = [torch.full_like(segment, 1e-6) for segment in segments[first : first + 2]]
    began = 0.0
    for number in range(10 + iterations):
        if number == 10:
            began = time.perf_counter()
        for gradient, segment in zip(gradients, segments[first:], strict=False):
            copy_and_check_finite(gradient, segment, params >= AROUND)
        mine.send(b".")
        mine.recv(1)
        optimizer.apply(pieces, 1.0, (), () if one_vector else pieces, spoil=True)
        mine.send(b".")
        mine.recv(1)
    took = (time.perf_counter() - began) / iterations
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return took


def take_turns(params: int, seconds: float) -> None:
    """Print how many versions a second, and what each takes."""
    pool = [shared(params) for _ in range(WORKERS + 1)]
    made = torch.frombuffer(mmap.mmap(-1, 16), dtype=torch.int64)
    """The versions there are; then, whether it is over."""
    child = os.fork()
    me = 0 if child else 1
    gradients = [torch.full((params,), 1e-6) for _ in range(2)]
    looked = stepped = 0.0
    turn, began = me, time.perf_counter()
    while not made[1]:
        gradient = gradients[turn // 2 % 2]
        started = time.perf_counter()
        is_finite(gradient)
        looked += time.perf_counter() - started
        while made[0] < turn and not made[1]:
            pass
        started = time.perf_counter()
        last, new = pool[turn % len(pool)], pool[(turn + 1) % len(pool)]
        for before, change, after in zip(*(each.split(PIECE) for each in (last, gradient, new)), strict=True):
            torch.add(before, change, alpha=-0.025, out=after)
        stepped += time.perf_counter() - started
        made[0] = turn + 1
        turn += 2
        if time.perf_counter() > began + seconds:
            made[1] = 1
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    turns, rate = max(1, turn // 2), float(made[0]) / (time.perf_counter() - began)
    print(
        f"{params:.0e} parameters: looking {1e6 * looked / turns:.0f} us, the step {1e6 * stepped / turns:.0f} us, "
        f"{rate:.0f} steps/s by turns"
    )


def seconds_each(pass_over, seconds: float) -> float:  # type: ignore[no-untyped-def]
    for turn in range(2 * WORKERS):
        pass_over(turn % WORKERS)
    began, turns = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        pass_over(turns % WORKERS)
        turns += 1
    return (time.perf_counter() - began) / turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--mode", choices=("asp", "bsp", "turns"), default="asp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.mode == "turns":
        take_turns(int(options.params), options.seconds)
        return
    segments = [shared(int(options.params)) for _ in range(WORKERS)]
    if options.mode == "bsp":
        count = max(20, int(2e8 * options.seconds / options.params))
        back, one = (1000 * iterate(segments, one_vector, count) for one_vector in (False, True))
        print(
            f"{options.params:.0e} parameters: at least {back:.2f} ms an iteration on two cores, "
            f"{one:.2f} ms if all models were one vector"
        )
        return
    into, out = os.pipe()
    if os.fork() == 0:
        os.write(out, repr(serve(segments, options.seconds)).encode())
        os._exit(0)
    worker_s = work(segments, options.seconds)
    server_s = float(os.read(into, 100))
    os.wait()
    print(
        f"{options.params:.0e} parameters: worker {1e6 * worker_s:.0f} us, server {1e6 * server_s:.0f} us, "
        f"so at most {2 / (worker_s + server_s):.0f} pushes/s on two cores"
    )


if __name__ == "__main__":
    main()
