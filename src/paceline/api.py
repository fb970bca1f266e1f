"""The functions for scripts, notebooks and tests: `simulate` in virtual time, `launch` in real processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch
from msgspec import structs

from paceline import cluster as clusters
from paceline import workloads
from paceline.batch_checks import batch_sizes, check_batch
from paceline.cluster import Cluster
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy, Policy
from paceline.counts import check_count as check_count
from paceline.errors import ConfigError
from paceline.live_evaluation import LiveEvaluation
from paceline.peer_checks import check_places, refuse_servers, warning_of
from paceline.policies import with_local_steps
from paceline.run import Point, Run, Target
from paceline.sample_order import SHUFFLED, Batch
from paceline.tensors import optimizers
from paceline.tensors.devices import CPU, check_device
from paceline.tensors.layout import DTYPES, EPS, check_slicing, layout_of
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.outer_optimizers import borders_of, inner_and_outer
from paceline.workload_training import train
from paceline.workloads.base import Workload

ITERATIONS = 200
ITERATIONS_TO_TARGET = 2000
"""The limit of each worker's iterations if a target is given and `iterations` is not."""

MOST_SERVERS = 1024
"""More servers than any machine has use for: each is a process, and each worker talks to all of them."""
MOST_SEED = 2**63 - 1
"""The largest seed that torch accepts."""

Watcher = Callable[[Point], None]


def simulate(
    workload: str | Workload = "digits-mlp",
    policy: str | Policy = "bsp",
    *,
    workers: int = 8,
    servers: int | None = None,
    cluster: str | Cluster = "steady",
    iterations: int | None = None,
    target: str | None = None,
    optimizer: str | None = None,
    batch: int | Sequence[int] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    by_layer: bool = False,
    slicing: str = EPS,
    shards: str = SHUFFLED,
    balance: bool = False,
    device: str = "cpu",
    local_steps: int | str | None = None,
    every_s: float | None = None,
    outer: str | None = None,
    watch: Watcher | None = None,
) -> Run:
    """Trains `workload` in virtual time: real gradients, a simulated clock, the same result for the same seed.

        run = paceline.simulate("digits-mlp", "ssp:staleness=3", cluster="random-slowdown:factor=6", iterations=100)
        print(run); run.history; run.metrics; run.report("run.html")

    `workload`, `policy` and `cluster` are texts, as for `paceline compare`, or objects; `paceline policies` and
    `paceline scenarios` list them. `servers` is 1 if not given; under a policy without any (hop, adpsgd) `workers` are
    peers, and what is evaluated is their average. Each worker does `iterations`; a run with a `target`
    ("accuracy=0.95") ends when it is reached. `optimizer` ("adam:lr=0.001") and `batch`, the samples of a gradient (a
    sequence has those of each worker), are the workload's own if not given; `dtype` is "float32" or "float64". `watch`
    is called with each point of the history as it comes.

    With `by_layer` workers read and push layer by layer, and there is a server for each layer. `slicing` is how the
    parameters are cut over the servers: "eps", equal slices, or "key-range", as in ps-lite. `shards` is how samples are
    dealt: "shuffled", or "sorted" by label, each worker its own for good. With `balance` each worker's batch follows
    its speed, as with `paceline.BatchSampler`. `device` is where gradients are computed: "cpu", "cuda" or "cuda:1".

    With `local_steps` (32, "auto", "proportional") or `every_s` workers train alone between exchanges, and servers step
    with `outer` ("nesterov(lr=0.7,momentum=0.9)"); a policy's text may say so too. `iterations` are local steps then.
    """
    check_servers_used([policy], servers)
    job = Job(
        workload,
        policy,
        workers,
        1 if servers is None else servers,
        cluster,
        iterations,
        target,
        optimizer,
        batch,
        seed,
        by_layer,
        slicing,
        shards,
        device,
        balance,
        local_steps,
        every_s,
        outer,
    )
    for warning in job.warnings:
        warnings.warn(warning, stacklevel=2)
    return simulate_job(job, dtype=dtype, watch=watch)


def simulate_job(job: Job, *, dtype: str = "float32", watch: Watcher | None = None) -> Run:
    """Trains a job in virtual time."""
    from paceline.runtime.virtual.tensor_backends import Training
    from paceline.runtime.virtual.training import run_training
    from paceline.runtime.virtual.world import SimulationPlan

    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    plan = SimulationPlan(
        job.policy,
        job.cluster,
        job.members,
        job.iterations,
        job.seed,
        job.sizes,
        by_layer=job.by_layer,
        checked=True,
        goodbyes=True,
        local=job.local,
    )
    training = Training(
        job.workload,
        job.optimizer,
        job.target,
        job.batch,
        DTYPES[dtype],
        slicing=job.slicing,
        shards=job.shards,
        device=job.device,
    )
    run = run_training(plan, training, watch)
    run.config = job.config()
    return run


def train_job_live(job: Job, *, watch: Watcher | None = None) -> Run:
    """Trains a job in real processes on this machine, with the cluster's slowdowns as sleeps."""
    if job.by_layer:
        raise ConfigError("by_layer is for virtual time: live workers read and push whole slices")
    if job.shards != SHUFFLED:
        raise ConfigError("shards=sorted is for virtual time")
    if job.device != CPU:
        raise ConfigError(f"device={job.device} is for virtual time: live workers of a workload compute on the CPU")
    with closing(LiveEvaluation(job.workload, job.seed)) as evaluation:
        with evaluation.evaluating() if job.target is not None else nullcontext():
            run = launch(
                partial(train, job.workload, job.optimizer, job.sizes, job.iterations, job.seed, evaluation),
                workers=job.members.workers,
                servers=job.members.servers or None,
                policy=job.policy,
                cluster=job.cluster,
                seed=job.seed,
                target=str(job.target) if job.target is not None else None,
                slicing=job.slicing,
                watch=watch,
                **(job.local.keywords() if job.local is not None else {}),
            )
        before = time.monotonic()
        _evaluate(run, evaluation)
        run.wall["evaluation_s"] = time.monotonic() - before
    run.config = job.config()
    return run


def _evaluate(run: Run, evaluation: LiveEvaluation) -> None:
    """Replaces what worker 0 has logged by what its copies are worth and, at the end, the model that the run leaves."""
    at_end = Point(run.time_s, run.metrics.updates, evaluation.of_model(run.model()))
    run.history = [*evaluation.history(), at_end]
    if run.target is not None:
        run.time_to_target_s = next((point.time_s for point in run.history if run.target.reached(point)), None)
    if not run.trace.header.members.servers:
        run.evaluated = f"peer 0, and in the end {run.evaluated.partition('the model is ')[2]}"


def launch(
    fn: Callable[[], object],
    *,
    workers: int = 2,
    servers: int | None = None,
    policy: str | Policy | None = None,
    cluster: str | Cluster | None = None,
    seed: int = 0,
    target: str | None = None,
    timeout_s: float | None = None,
    slicing: str = EPS,
    watch: Watcher | None = None,
    servers_on: str = "auto",
    local_steps: int | str | None = None,
    every_s: float | None = None,
    outer: str | None = None,
) -> Run:
    """Trains live: calls `fn` in `workers` processes on this machine, with `servers` parameter servers (1) beside them.

        run = paceline.launch(train, workers=4, servers=1, policy="asp")

    `fn` is an ordinary training function that uses `paceline.Optimizer`. It runs in forks of this process, so closures
    and functions of a notebook work. A `policy` given here overrides the one in `fn`. Under a policy without servers
    (hop, adpsgd) the processes are peers, each with an optimizer of its own, and the model is their average.

    `cluster` slows workers down and injects faults as a scenario says, drawn from `seed`. The run ends when `fn` has
    returned everywhere, or when what it logs reaches the `target` ("accuracy=0.95", "val_loss<=2"); it fails if it
    takes longer than `timeout_s`. `slicing` is how the parameters are cut over the servers: "eps", equal slices, or
    "key-range", as in ps-lite. `watch` is called with each point of the history as it comes. `servers_on` says where
    the parameters are: "cpu", "gpu", or "auto", where the models are (docs/gpu.md). `local_steps` (a number, or "auto")
    or `every_s` has workers train alone between exchanges, and `outer` is the servers' optimizer then
    (docs/local-steps.md).
    """
    from paceline.function_workers import function_starter
    from paceline.live_checks import check_live
    from paceline.runtime.live.driver.driver import Driver, RunPlan
    from paceline.runtime.live.driver.health import FaultPolicy

    size = check_live(workers, servers, policy, cluster, slicing, seed, local_steps, every_s, outer)
    plan = RunPlan(
        members=size.members,
        starter=function_starter(fn),
        policy=size.policy,
        local_steps=size.local_steps,
        cluster=size.cluster,
        seed=seed,
        target=Target.parse(target) if target is not None else None,
        care=FaultPolicy(timeout_s=timeout_s),
        slicing=check_slicing(slicing),
        servers_asked=servers,
        servers_on=check_servers_on(servers_on),
    )
    return Driver(plan, watch=watch).run()


def check_servers_on(place: str) -> str:
    if place not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"servers_on={place!r} is none of auto, cpu, gpu")
    return place


class Job:
    """A bundled workload to train, with everything checked and nothing started."""

    def __init__(
        self,
        workload: str | Workload,
        policy: str | Policy,
        workers: int,
        servers: int,
        cluster: str | Cluster,
        iterations: int | None,
        target: str | None,
        optimizer: str | None,
        batch: int | Sequence[int] | None,
        seed: int,
        by_layer: bool = False,
        slicing: str = EPS,
        shards: str = SHUFFLED,
        device: str = "cpu",
        balance: bool = False,
        local_steps: int | str | None = None,
        every_s: float | None = None,
        outer: str | None = None,
    ) -> None:
        self.device = check_device(device)
        self.members = check_members(workers, servers, seed)
        self.shards = shards
        self.warnings: list[str] = []
        """What is allowed and should be known."""
        self.slicing = check_slicing(slicing)
        self.workload = workloads.load(workload)
        self.by_layer = by_layer
        if by_layer and slicing != EPS:
            raise ConfigError(f"slicing={slicing} cannot be had by_layer: there each layer has a server of its own")
        if by_layer:
            self.members = self._server_for_each_layer()
        self.policy, self.local = with_local_steps.parse(policy, local_steps, every_s, outer)
        self.policy.validate(self.members)
        if self.local is not None and (by_layer or balance):
            raise ConfigError(f"{'by_layer' if by_layer else 'balance=True'} cannot be had with {self.local}")
        self.cluster = check_cluster(cluster, self.members)
        if isinstance(self.policy, PeerPolicy):
            self._check_peers()
        elif self.cluster.machines or self.cluster.edges:
            raise ConfigError(f"machines and [[edge]] are for policies without servers: {self.policy} has some")
        self.target = Target.parse(target, self.workload.metrics) if target is not None else None
        self.batch = check_batch(batch, self.members.workers) if batch is not None else self.workload.batch
        self.sizes = batch_sizes(self.batch, balance, self.policy, shards, by_layer)
        self.optimizer_text = optimizer or self.workload.optimizer
        self.optimizer = check_optimizer(
            self.optimizer_text, self.workload, self.batch, self.members, self.slicing, self.local
        )
        default = ITERATIONS if target is None else ITERATIONS_TO_TARGET
        self.iterations = check_count("iterations", iterations) if iterations is not None else default
        self.seed = seed

    def _check_peers(self) -> None:
        """Refuses what only servers can do. A number of servers is no reason: other policies may be compared with."""
        if self.by_layer or self.slicing != EPS:
            raise ConfigError(f"{self.policy} has no servers: slicing and by_layer are not for it")
        check_places(self.cluster, self.members)
        assert isinstance(self.policy, PeerPolicy)
        self.warnings += filter(None, [warning_of(self.policy, self.members.workers)])
        self.members = Members(self.members.workers, 0)

    def _server_for_each_layer(self) -> Members:
        layers = len(layout_of(trained_in(self.workload), "layers").units())
        if self.members.servers not in (1, layers):
            raise ConfigError(
                f"servers={self.members.servers} is out of range: by_layer has {layers}, one for each layer"
            )
        return Members(self.members.workers, layers)

    def config(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "data": self.workload.data or None,
            "workers": self.members.workers,
            "servers": self.members.servers,
            "slicing": self.slicing,
            "shards": self.shards,
            "cluster": str(self.cluster),
            "iterations": self.iterations,
            "target": str(self.target) if self.target is not None else None,
            "optimizer": self.optimizer_text,
            "batch": self.batch,
            "seed": self.seed,
            "device": str(self.device),
            "local_steps": str(self.local) if self.local is not None else None,
            "torch": torch.__version__,
        }


def check_members(workers: int, servers: int, seed: int) -> Members:
    check_count("workers", workers)
    check_count("servers", servers, most=MOST_SERVERS)
    check_count("seed", seed, least=0, most=MOST_SEED)
    return Members(workers, servers)


def check_servers_used(given: Sequence[str | Policy], servers: int | None) -> None:
    """Refuses a number of servers where no policy has any; policies without servers may stand beside one with."""
    checked = [with_local_steps.parse(policy).policy for policy in given]
    if checked and all(isinstance(policy, PeerPolicy) for policy in checked):
        refuse_servers(checked[0], servers, EPS)


def check_optimizer(
    text: str,
    workload: Workload,
    batch: Batch,
    members: Members,
    slicing: str = EPS,
    local: LocalSteps | None = None,
) -> OptimizerSpec:
    """Returns the optimizer for this workload; refuses one that cannot train its tensors on so many servers."""
    spec = optimizers.parse(text)
    if not isinstance(batch, int):
        batch = max(1, sum(batch) // len(batch))
    if not spec.extras.batch:
        spec = structs.replace(spec, extras=structs.replace(spec.extras, batch=batch))
    inner, outer = inner_and_outer(spec, local) if local is not None else (spec, spec)
    layout = layout_of(trained_in(workload), borders_of(inner, outer), slicing)
    inner.check(layout)
    outer.check(layout)
    if members.servers > layout.numel:
        raise ConfigError(f"servers={members.servers} is out of range: the model has {layout.numel} parameters")
    layout.slices(max(1, members.servers))
    return spec


def trained_in(workload: Workload) -> list[tuple[str, torch.Tensor, int]]:
    """Returns (name, tensor, group) of what a workload trains."""
    return [(name, tensor, 0) for name, tensor in workload.module(0).named_parameters() if tensor.requires_grad]


def check_cluster(cluster: str | Cluster, members: Members) -> Cluster:
    checked = clusters.load(cluster)
    try:
        checked.validate(members.workers)
    except ConfigError as error:
        raise ConfigError(f"{checked.source}: {error}" if checked.source else str(error)) from None
    return checked
