"""What it costs that a computation could be given up, and how soon it ends when it is (SpecSync, live).

    python benchmarks/aborting.py [--steps 300]

One worker's closure without a run around it: plain, and by `Aborting` with nothing to abort, in turn; the time is
that of the processor, so that neighbours on the machine do not count. Then aborts, by the clock on the wall: the word
is written by another thread at a random moment; measured is the time from then to the end of the pass.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.actions import Compute
from paceline.runtime.live.storage.abort_flag import AbortFlag
from paceline.runtime.live.trainer.sample_leases import SampleLeases
from paceline.runtime.live.worker.abortable_step import AbortableStep


def small() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(32, 64)


def deep() -> tuple[nn.Module, Tensor]:
    block = [layer for _ in range(20) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True))]
    return nn.Sequential(nn.Conv2d(1, 16, 3), *block, nn.Flatten(), nn.LazyLinear(10)), torch.randn(16, 1, 28, 28)


def measure(name: str, make: Callable[[], tuple[nn.Module, Tensor]], steps: int) -> None:
    (plain, x), (watched, _) = make(), make()
    plain(x), watched(x)
    begun: list[float] = []
    computation: Any = SimpleNamespace(
        ordered=Compute(0, 0), stretch=lambda started, look=None: None,
        begin_again=lambda: begun.append(time.perf_counter()),
    )  # fmt: skip
    flag = AbortFlag(Path(tempfile.mkdtemp()) / "flag", create=True)
    # Nothing here draws samples, so no worker is needed for their leases.
    leases = SampleLeases(None, None, None)  # type: ignore[arg-type]
    aborting = AbortableStep(computation, leases, flag, 0, list(watched.parameters()), watched)

    def closure_of(net: nn.Module) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            if net is watched:
                aborting.rewind.before_clearing()  # as the optimizer's zero_grad does
            net.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        return closure

    bare, guarded = closure_of(plain), closure_of(watched)
    without, with_hooks = [], []
    for _ in range(steps):
        started = time.process_time()
        bare()
        without.append(time.process_time() - started)
        started = time.process_time()
        aborting.run(guarded, 0.0)
        with_hooks.append(time.process_time() - started)
    usual = statistics.median(without)
    delays = []
    for _ in range(steps // 3):
        rung: list[float] = []

        def ring(rung: list[float] = rung) -> None:
            rung.append(time.perf_counter())
            aborting.flag.set(0)

        aborting.flag.set(10)
        begun.clear()
        timer = threading.Timer(random.uniform(0.1, 0.7) * usual, ring)
        timer.start()
        aborting.run(guarded, 0.0)
        timer.join()
        if begun:
            delays.append(begun[0] - rung[0])
    cost = statistics.median(with_hooks) - usual
    ended = f"{1e3 * statistics.median(delays):.2f} ms in the median of {len(delays)}" if delays else "never in time"
    print(f"{name}: {1e3 * usual:.2f} ms a pass; {1e6 * cost:.0f} us more with hooks; given up after {ended}")
    aborting.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measure("64-64-10 MLP, batch 32", small, steps)
    measure("20 convolutions with batch norm, batch 16", deep, max(30, steps // 5))


if __name__ == "__main__":
    main()
