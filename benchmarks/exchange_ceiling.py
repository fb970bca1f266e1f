"""What an exchange through shared memory costs at least on this machine: its passes over memory, and nothing else.

    python benchmarks/exchange_ceiling.py --params 1000000

With (workers + 2) x P floats of memory a push takes four passes: the worker copies its gradient into its segment and
looks whether it is finite, the server steps on it and writes the new parameters back into the segment. Here one
process does nothing but the first two, over the segments of four workers in turn, and another nothing but the last two,
in the pieces and with the calls that paceline uses; each has a core. There are no messages, no machines, no waiting.
Two cores that share all the work of a push cannot do more pushes a second than two over the sum of both times.
`paceline bench exchange` prints what the whole exchange does.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time

import torch

from paceline.runtime.live.worker.staging import copy_and_look
from paceline.tensors.layout import layout_of
from paceline.tensors.optimizers import SliceOptimizer, parse

WORKERS = 4


def shared(params: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 4 * params), dtype=torch.float32)


def serve(segments: list[torch.Tensor], seconds: float) -> float:
    params = len(segments[0])
    values = torch.zeros(params)
    layout = layout_of([("weight", values, 0)])
    optimizer = SliceOptimizer(layout, slice(0, params), values, parse("sgd:lr=0.1"))
    pieces = [optimizer.cut(segment) for segment in segments]
    return seconds_each(lambda turn: optimizer.apply([pieces[turn]], 0.25, (), [pieces[turn]]), seconds)


def work(segments: list[torch.Tensor], seconds: float) -> float:
    gradients = [torch.full_like(segment, 1e-6) for segment in segments]
    return seconds_each(lambda turn: copy_and_look(gradients[turn], segments[turn]), seconds)


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    segments = [shared(int(options.params)) for _ in range(WORKERS)]
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
