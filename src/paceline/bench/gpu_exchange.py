"""`paceline bench gpu`: a model on the GPU under paceline, the same loop without it, and DDP beside them.

An exchange is a step without computing: the gradient is there, `opt.step()` has it stepped with and returns when the
new parameters are in the model. A step is with computing, in bfloat16. The plain loop steps torch's fused optimizer.
All workers of one row share the GPUs there are; time slices of several processes on one GPU are in every figure, unless
MPS runs. The bench itself never touches CUDA, since its forks, servers and workers, do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import policies, session
from paceline.api import launch
from paceline.bench.competitors import OPTIMIZERS
from paceline.bench.transformer import Shape, Transformer, batch_of, compute
from paceline.core.policy import PeerPolicy
from paceline.errors import ConfigError, PacelineError
from paceline.optim import Optimizer

WARM, EXCHANGES, STEPS = 5, 30, 20
TIMEOUT_S = 300.0


@dataclass
class Row:
    optimizer: str
    policy: str
    workers: int
    params: int
    exchange_ms: float
    step_ms: float
    plain_step_ms: float
    """Of one process that has the GPU to itself: the faster of a run before the others and one after them."""
    memory_floats: float | None
    """The device's memory in an exchange over `params`, contexts of CUDA not counted."""
    ddp: str
    """What DDP ran over: nccl, if there is a GPU for each worker, else gloo; "" with one worker."""
    ddp_step_ms: float | None


@dataclass(frozen=True)
class Setting:
    shape: Shape
    optimizer: str
    servers_on: str

    @property
    def params(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Transformer(self.shape).parameters())


def run(
    setting: Setting, chosen: list[str], workers: list[int], with_ddp: bool, say: Callable[[str], None]
) -> list[Row]:
    alone = plain_loop(setting, say)
    ddp: dict[int, tuple[str, float | None]] = {1: ("", None)}
    rows = []
    for policy in chosen:
        for count in workers:
            if isinstance(policies.parse(policy), PeerPolicy) and count == 1:
                continue
            if count not in ddp:
                ddp[count] = measure_ddp(count, setting) if with_ddp else ("", None)
            rows.append(_row(policy, count, setting, alone, ddp[count]))
            say(f"{policy}, {count} workers: exchange {rows[-1].exchange_ms:.4g} ms, step {rows[-1].step_ms:.4g} ms")
    plain_ms = min(alone["step_ms"], plain_loop(setting, say)["step_ms"])
    return [replace(row, plain_step_ms=plain_ms) for row in rows]


def plain_loop(setting: Setting, say: Callable[[str], None]) -> dict[str, float]:
    """Measures the loop without paceline, before and after the others: the faster one counts."""
    alone = in_processes("plain", 1, setting)[0]
    say(f"the plain loop: {alone['step_ms']:.4g} ms a step; a context of CUDA: {alone['context'] / 1e6:.0f} MB")
    return alone


def _row(policy: str, count: int, setting: Setting, alone: dict[str, float], ddp: tuple[str, float | None]) -> Row:
    peers = isinstance(policies.parse(policy), PeerPolicy)
    ended = launch(
        lambda: work(setting), workers=count, servers=None if peers else 1, policy=policy, timeout_s=TIMEOUT_S,
        servers_on=setting.servers_on,
    )  # fmt: skip
    if ended.failures:
        raise PacelineError(f"{policy} with {count} workers failed: {ended.failures[0]}")
    exchanges, steps, used = (
        [point.values[name] for point in ended.history if name in point.values]
        for name in ("exchange_ms", "step_ms", "used")
    )
    contexts = alone["context"] * (count + (not peers))
    floats = max(0.0, max(used) - alone["before"] - contexts) / (4 * setting.params) if used else None
    return Row(
        setting.optimizer, policy, count, setting.params, max(exchanges), max(steps), alone["step_ms"], floats, *ddp
    )


def work(setting: Setting) -> None:
    """What each worker does: first exchanges, then steps."""
    rank = session.init().rank
    device = place_of(rank)
    torch.manual_seed(0)
    with device:
        model = Transformer(setting.shape)
    opt = Optimizer(make_optimizer(setting.optimizer, model, fused=device.type == "cuda" or None), model=model)

    def fill() -> None:
        """Has every parameter have a gradient, without the memory of a forward."""
        opt.zero_grad()
        for parameter in model.parameters():
            (parameter.sum() * 1e-6).backward()

    fill()
    exchange_ms = timed(opt.step, EXCHANGES, device, session.barrier)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        session.barrier()
        if rank == 0:
            free, total = torch.cuda.mem_get_info(device)
            session.log(used=total - free)
        session.barrier()
    tokens = batch_of(setting.shape, device)

    def step() -> None:
        opt.zero_grad()
        compute(model, tokens)
        opt.step()

    step_ms = timed(step, STEPS, device, session.barrier)
    session.log(exchange_ms=exchange_ms, step_ms=step_ms)


def timed(step: Callable[[], object], count: int, device: torch.device, meet: Callable[[], None]) -> float:
    """Returns the milliseconds of a step, after some that are not counted."""
    for _ in range(WARM):
        step()
    settle(device)
    meet()
    began = time.perf_counter()
    for _ in range(count):
        step()
    settle(device)
    return 1000 * (time.perf_counter() - began) / count


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def place_of(rank: int) -> torch.device:
    """Returns the device of a worker: its own GPU, if there are enough, and the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_optimizer(name: str, model: Transformer, fused: bool | None = None) -> torch.optim.Optimizer:
    cls, hyper = OPTIMIZERS[name]
    given: dict[str, Any] = {**hyper, "lr": 1e-4, "fused": fused}
    return cls(model.parameters(), **given)


# Beside it, in processes of their own.


def in_processes(what: str, size: int, setting: Setting) -> list[dict[str, float]]:
    """Runs a competitor in `size` processes, and returns what each has found."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        texts = [
            json.dumps([what, rank, size, f"{folder}/store", setting.shape, setting.optimizer]) for rank in range(size)
        ]
        command = [sys.executable, "-W", "ignore", "-m", "paceline.bench.gpu_exchange"]
        processes = [subprocess.Popen([*command, text], stdout=subprocess.PIPE, text=True) for text in texts]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise PacelineError(f"the {what} loop failed with exit codes {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure_ddp(count: int, setting: Setting) -> tuple[str, float | None]:
    found = in_processes("ddp", count, setting)
    return ("nccl" if found[0]["gpus"] >= count else "gloo"), max(each["step_ms"] for each in found)


def plain(setting: Setting) -> dict[str, float]:
    """One process that trains by itself; and what a context of CUDA needs."""
    device, before, context = place_of(0), 0.0, 0.0
    if device.type == "cuda":
        before = held_by_all()
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        context = total - free - before
    with device:
        model = Transformer(setting.shape)
    optimizer, tokens = make_optimizer(setting.optimizer, model, fused=True), batch_of(setting.shape, device)

    def step() -> None:
        optimizer.zero_grad()
        compute(model, tokens)
        optimizer.step()

    return {"step_ms": timed(step, STEPS, device, lambda: None), "before": before, "context": context}


def held_by_all() -> float:
    """Returns the bytes of the GPU that others hold, as its tool says."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * (1 << 20)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0.0


def ddp_loop(rank: int, size: int, store: str, setting: Setting) -> dict[str, float]:
    device = place_of(rank)
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus >= size else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    with device:
        model = Transformer(setting.shape)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, tokens = make_optimizer(setting.optimizer, model, fused=True), batch_of(setting.shape, device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = wrapped(tokens)
        loss.backward()
        optimizer.step()

    def meet() -> None:
        dist.barrier()

    return {"step_ms": timed(step, STEPS // 4, device, meet), "gpus": gpus}


def check_gpu() -> None:
    """Refuses a host without a GPU. A process of its own looks: whoever looks cannot fork processes that use CUDA."""
    look = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(look, capture_output=True, check=False).returncode:
        raise ConfigError("paceline bench gpu needs a GPU: torch finds none here")


def main() -> None:
    """Runs `python -m paceline.bench.gpu_exchange JSON`, one process beside paceline's."""
    what, rank, size, store, shape, optimizer = json.loads(sys.argv[1])
    setting = Setting(Shape(*shape), optimizer, "cpu")
    print(json.dumps(plain(setting) if what == "plain" else ddp_loop(rank, size, store, setting)), flush=True)
    os._exit(0)  # threads of Gloo and NCCL have nothing more to say


if __name__ == "__main__":
    main()
