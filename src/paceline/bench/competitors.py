"""What a user would pick instead of paceline, each in processes of its own on this machine.

    ring       each sends its parameters to two neighbours over Gloo and averages theirs in
    ddp        all-reduce of the gradient over Gloo, then the optimizer: data-parallel training
    averaging  post-local SGD: local steps, then the models are averaged over Gloo
    rpc        a parameter server on torch RPC (TensorPipe: shared memory on one host; over TCP if so asked)
    ray        Ray's parameter-server pattern, when ray is installed (with two nodes, if over TCP)

A peer's worker is a function of (rank, size, store, options) that returns plain numbers; `measure` runs it in
`size` processes. It gets what favours it: no framework around the exchange, no look for NaN, and everything warm. All
end an exchange with the parameters in the worker's model. What torch RPC delivers is the worker's own memory, which
becomes the model's; what Ray delivers may only be read, so as in Ray's own example it is copied.

All hand out parameters of one version. Ray's server does one thing at a time; torch RPC's has threads, so it steps and
copies under a lock. Without that it is faster, sends what other threads are changing, and loses parts of gradients
(`rpc_unlocked`, measured beside it; `benchmarks/rpc_tears.py` counts what comes of it).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline import cluster as clusters
from paceline import workloads
from paceline.errors import PacelineError
from paceline.run import Point, Target
from paceline.sample_order import SampleOrder

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.001}),
}
"""The optimizers of an exchange, by name."""
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
"""How many vectors each keeps beside the parameters."""

Options = dict[str, Any]
Worker = Callable[[int, int, str, Options], Any]


def measure(peer: str, size: int, options: Options, timeout_s: float = 300.0) -> list[Any]:
    """Runs a competitor in `size` processes, and returns what each of them has returned."""
    if peer == "ray":
        return [_alone(_ray, size, options)]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, "-W", "ignore", "-m", "paceline.bench.competitors", peer]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [json.dumps([rank, size, f"{folder}/store", options]) for rank in range(size)]
        processes = [
            subprocess.Popen([*command, text], stdout=subprocess.PIPE, env=environment, text=True) for text in arguments
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise PacelineError(f"the peer {peer} failed with exit codes {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _join(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))


def make_optimizer(name: str, parameter: torch.nn.Parameter, fused: bool | None = None) -> torch.optim.Optimizer:
    cls, hyper = OPTIMIZERS[name]
    given: dict[str, Any] = {**hyper, "fused": fused}
    return cls([parameter], **given)


def exchange_ddp(rank: int, size: int, store: str, options: Options) -> float:
    """Returns the milliseconds of one iteration: all-reduce, mean, step."""
    _join(rank, size, store)
    parameter = torch.nn.Parameter(torch.zeros(options["params"]))
    parameter.grad = torch.full((options["params"],), 1e-6)
    optimizer = make_optimizer(options.get("optimizer", "sgd"), parameter, fused=True)

    def iterate(count: int) -> None:
        for _ in range(count):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size)
            optimizer.step()

    iterate(options["warm"])
    dist.barrier()
    began = time.perf_counter()
    iterate(options["count"])
    return float(1000 * (time.perf_counter() - began) / options["count"])


def exchange_ring(rank: int, size: int, store: str, options: Options) -> tuple[float, float]:
    """Returns the milliseconds, and the processor time, of one iteration: send to both neighbours, receive from both,
    average."""
    _join(rank, size, store)
    values = torch.full((options["params"],), float(rank))
    before, after = torch.empty_like(values), torch.empty_like(values)
    left, right = (rank - 1) % size, (rank + 1) % size

    def iterate(count: int) -> None:
        for _ in range(count):
            under_way = [dist.isend(values, left), dist.isend(values, right)]
            under_way += [dist.irecv(before, left), dist.irecv(after, right)]
            for work in under_way:
                assert work is not None
                work.wait()
            values.lerp_(before, 1 / 2).lerp_(after, 1 / 3)

    iterate(options["warm"])
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    iterate(options["count"])
    scale = 1000 / options["count"]
    return scale * (time.perf_counter() - began), scale * (time.process_time() - worked)


class _Parameters:
    """The server's state in the RPC competitor; it is in rank 0's process."""

    values: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    lock = threading.Lock()


def _push_pull(gradient: torch.Tensor) -> torch.Tensor:
    with _Parameters.lock:
        return _push_pull_unlocked(gradient).clone()


def _push_pull_unlocked(gradient: torch.Tensor) -> torch.Tensor:
    _Parameters.values.grad = gradient
    _Parameters.optimizer.step()
    return _Parameters.values.data


def exchange_rpc(rank: int, size: int, store: str, options: Options, push_pull: Any = _push_pull) -> float:
    """Returns the pushes a second of one worker (rank 0 is the server); with `look`, the share of answers that mix
    versions."""
    import torch.distributed.rpc as rpc

    transports, channels = (["uv"], ["basic"]) if options["transport"] == "tcp" else (None, None)
    backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", _transports=transports, _channels=channels)
    if rank == 0:
        _Parameters.values = torch.nn.Parameter(torch.zeros(options["params"]))
        _Parameters.optimizer = make_optimizer(options.get("optimizer", "sgd"), _Parameters.values, fused=True)
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=size, rpc_backend_options=backend)
    rate = 0.0
    if rank:
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        gradient = torch.full((options["params"],), 1e-6)

        def iterate(count: int) -> None:
            for _ in range(count):
                parameter.data = rpc.rpc_sync("node0", push_pull, args=(gradient,))

        iterate(options["warm"])
        if options.get("look"):
            mixed = 0
            for _ in range(options["count"]):
                iterate(1)
                mixed += bool(parameter.min() != parameter.max())
            rate = mixed / options["count"]
        else:
            began = time.perf_counter()
            iterate(options["count"])
            rate = options["count"] / (time.perf_counter() - began)
    rpc.shutdown()
    return rate


def _ray(size: int, options: Options) -> float:
    """Returns the pushes a second of all workers together."""
    ray: Any = importlib.import_module("ray")
    stop = _start_ray(ray, size, options["transport"] == "tcp")

    class Server:
        def __init__(self) -> None:
            self.values = np.zeros(options["params"], dtype=np.float32)
            self.parameter = torch.nn.Parameter(torch.from_numpy(self.values))
            self.optimizer = make_optimizer(options.get("optimizer", "sgd"), self.parameter, fused=True)

        def push_pull(self, gradient: Any) -> Any:
            self.parameter.grad = torch.from_numpy(gradient)
            self.optimizer.step()
            return self.values

    def work(server: Any) -> float:
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        gradient = np.full(options["params"], 1e-6, dtype=np.float32)

        def iterate(count: int) -> None:
            for _ in range(count):
                parameter.data.copy_(torch.from_numpy(ray.get(server.push_pull.remote(gradient))))

        iterate(options["warm"])
        began = time.perf_counter()
        iterate(options["count"])
        return float(options["count"] / (time.perf_counter() - began))

    try:
        server = ray.remote(resources={"server": 1}, num_cpus=0)(Server).remote()
        worker = ray.remote(resources={"worker": 1})(work)
        return float(sum(ray.get([worker.remote(server) for _ in range(size)])))
    finally:
        stop()


def _start_ray(ray: Any, size: int, over_tcp: bool) -> Callable[[], None]:
    """Starts Ray with a place for the server and one for each worker; returns what ends it all.

    Within a node Ray uses shared memory: over TCP the server is on a node of its own, as on another host, and what goes
    between nodes goes over the network.
    """
    quiet = {"log_to_driver": False, "configure_logging": False}
    here, there = {"server": 1}, {"worker": size}
    if not over_tcp:
        ray.init(num_cpus=size + 1, resources={**here, **there}, include_dashboard=False, **quiet)
        stop: Callable[[], None] = ray.shutdown
        return stop
    nodes: Any = importlib.import_module("ray.cluster_utils").Cluster()
    nodes.add_node(num_cpus=1, resources=here, include_dashboard=False)
    nodes.add_node(num_cpus=size, resources=there)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, **quiet)

    def stop_both() -> None:
        ray.shutdown()
        nodes.shutdown()

    return stop_both


def _alone(work: Callable[[int, Options], float], size: int, options: Options) -> float:
    """Runs the work in a process of its own, so that nothing of it stays."""
    text = json.dumps([0, size, "", options])
    command = [sys.executable, "-m", "paceline.bench.competitors", "ray", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(f"the peer ray failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def straggler(rank: int, size: int, store: str, options: Options) -> dict[str, float | None]:
    """Trains digits over Gloo until the target; `local_steps` 1 is DDP, more is post-local SGD.

    Every worker sleeps as the scenario says. Worker 0 evaluates after each exchange; the others learn from it whether
    to go on with the next one, so nobody does an extra round trip.
    """
    _join(rank, size, store)
    workload = workloads.load("digits-mlp")
    target = Target.parse(options["target"])
    duration = clusters.load(options["cluster"]).durations(rank, size, options["seed"])
    module = workload.module(options["seed"])
    optimizer = torch.optim.SGD(module.parameters(), lr=options["lr"])
    order = SampleOrder(len(workload.train[0]), size, workload.batch, options["seed"])
    tensors = list(module.parameters())
    local_steps: int = options["local_steps"]
    stop = torch.zeros(1)
    dist.barrier()
    began = time.monotonic()
    reached: float | None = None
    iteration = 0
    while iteration < options["iterations"]:
        started = time.monotonic()
        samples = torch.from_numpy(order.of_worker(rank, iteration))
        optimizer.zero_grad()
        workload.loss(module(workload.train[0][samples]), workload.train[1][samples]).backward()
        time.sleep(max(0.0, duration() - (time.monotonic() - started)))
        iteration += 1
        if local_steps == 1:
            _average([tensor.grad for tensor in tensors if tensor.grad is not None], stop, size)
        optimizer.step()
        if local_steps > 1 and iteration % local_steps == 0:
            _average([tensor.data for tensor in tensors], stop, size)
        if iteration % local_steps == 0:
            if stop.item() > 0:
                break
            if rank == 0 and reached is None:
                measured = workload.evaluate(module)
                point = Point(time.monotonic() - began, iteration, measured)
                if target.reached(point):
                    reached = point.time_s
                    stop.fill_(1.0)
    parameters = sum(tensor.numel() for tensor in tensors)
    return {"time_to_target_s": reached, "iterations": iteration, "parameters": parameters}


def _average(tensors: list[torch.Tensor], stop: torch.Tensor, size: int) -> None:
    """Averages everything in one all-reduce, with a flag to stop in its last element."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors] + [stop])
    dist.all_reduce(flat)
    flat.div_(size)
    start = 0
    for tensor in [*tensors, stop]:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


WORKERS: dict[str, Worker] = {
    "ring": exchange_ring,
    "ddp": exchange_ddp,
    "rpc": exchange_rpc,
    "rpc_unlocked": partial(exchange_rpc, push_pull=_push_pull_unlocked),
    "straggler": straggler,
}


def main() -> None:
    """Runs `python -m paceline.bench.competitors NAME JSON`, one process of a competitor."""
    torch.set_num_threads(1)
    rank, size, store, options = json.loads(sys.argv[2])
    result = _ray(size, options) if sys.argv[1] == "ray" else WORKERS[sys.argv[1]](rank, size, store, options)
    print(json.dumps(result), flush=True)
    # Gloo's and TensorPipe's threads have nothing more to say.
    os._exit(0)


if __name__ == "__main__":
    main()
