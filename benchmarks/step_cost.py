"""What a worker's step costs besides its gradient, in processor time: with a small model, and with one that fills the
caches.

    python benchmarks/step_cost.py --mode asp --params 1000 1000000

Four workers and a server, as in `paceline bench exchange`. Copying a gradient into shared memory and looking at it is
measured by itself, where it happens, by a function put in its place in this process and its forks; it is taken off what
a step takes altogether. (Reading the processor's clock twice a step is in it.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch

from paceline import policies, session
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.optim import Optimizer
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.tensors import fused_kernels

WORKERS = 4
WARM, COUNT = 100, 1000


def measure(mode: str, params: int) -> tuple[float, float]:
    """Microseconds of a step: the gradient, and the rest. The median of the workers."""
    copy_and_check_finite = fused_kernels.copy_and_check_finite

    def work() -> None:
        spent = 0.0

        def measured(*given: Any) -> bool:
            nonlocal spent
            began = time.process_time()
            finite = copy_and_check_finite(*given)
            spent += time.process_time() - began
            return finite

        session.init()
        parameter = torch.nn.Parameter(torch.zeros(params))
        parameter.grad = torch.full((params,), 1e-6)
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(WARM):
            opt.step()
        with mock.patch.object(fused_kernels, "copy_and_check_finite", measured):
            began = time.process_time()
            for _ in range(COUNT):
                opt.step()
            took = time.process_time() - began
        session.log(loss=1e6 * spent / COUNT, accuracy=1e6 * (took - spent) / COUNT)

    run = Driver(RunPlan(Members(WORKERS, 1), function_starter(work), policies.parse(mode))).run()
    gradient = [point.loss for point in run.history if point.loss is not None]
    rest = [point.accuracy for point in run.history if point.accuracy is not None]
    return statistics.median(gradient), statistics.median(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("asp", "bsp"), default="asp")
    parser.add_argument("--params", type=float, nargs="+", default=(1e3, 1e6))
    options = parser.parse_args()
    for params in options.params:
        gradient, rest = measure(options.mode, int(params))
        print(f"{options.mode} {params:.0e}: the gradient {gradient:.0f} us, the rest of a step {rest:.0f} us")


if __name__ == "__main__":
    main()
