"""What a run leaves behind, virtual or live: history, metrics, trace, parameters, report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline import policies
from paceline.core.machine import Machine
from paceline.core.messages import Node
from paceline.core.policy import PeerPolicy
from paceline.core.topology import distances, neighbours
from paceline.core.trace import Divergence, Header, Trace, replay
from paceline.errors import ConfigError
from paceline.report.barriers import Barrier, barriers, totals
from paceline.report.chrome import chrome_trace
from paceline.report.html import RunView, write
from paceline.report.metrics import Metrics, measure, spans
from paceline.report.peers import PeersView, peers_view
from paceline.report.staleness import staleness_by_shard
from paceline.tensors.layout import imbalance

KNOWN_METRICS = ("accuracy", "loss")
ON_SERVERS = "the parameters on the servers"


class Point(NamedTuple):
    """The model at one moment: seconds since the run began, optimizer steps, loss and accuracy on the test set."""

    time_s: float
    updates: int
    loss: float | None
    accuracy: float | None


class ServerChange(NamedTuple):
    """The number of servers changed: when, from and to how many, what share of the parameters moved.

    `held_s` is from telling the workers to stand still until they are told to go on, `moving_s` the last part of it,
    in which nobody computes.
    """

    at_s: float
    before: int
    after: int
    moved_share: float
    held_s: float
    moving_s: float

    def __str__(self) -> str:
        return (
            f"{self.after} server{'s' * (self.after > 1)} instead of {self.before}: "
            f"{self.moved_share:.1%} of the parameters moved, "
            f"training was held for {self.held_s:.3f} s"
        )


@dataclass(frozen=True)
class Target:
    """When a run has learned enough: accuracy at least, or loss at most, `value`."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str, metrics: tuple[str, ...] = KNOWN_METRICS) -> Target:
        if not isinstance(text, str):
            raise ConfigError(f"a target is a text like 'accuracy=0.95', got {text!r}")
        name, equals, number = text.partition("=")
        if not equals or name not in metrics:
            raise ConfigError(f"unknown target {text!r}: write METRIC=VALUE with METRIC one of {', '.join(metrics)}")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"the target {text!r} needs a number after {name}=") from None
        if not math.isfinite(value) or (name == "accuracy" and not 0 <= value <= 1):
            allowed = "from 0 to 1" if name == "accuracy" else "a finite number"
            raise ConfigError(f"the target {text!r} is out of range: {name} is {allowed}")
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    def reached(self, point: Point) -> bool:
        value = point.accuracy if self.metric == "accuracy" else point.loss
        if value is None or math.isnan(value):
            return False
        return value >= self.value if self.metric == "accuracy" else value <= self.value


@dataclass
class Run:
    """The result of `simulate` or `launch`."""

    policy: str
    runtime: str
    history: list[Point]
    trace: Trace
    parameters: dict[str, Tensor]
    time_s: float
    target: Target | None = None
    time_to_target_s: float | None = None
    others: dict[str, Tensor] = field(default_factory=dict)
    """Frozen parameters and buffers; live also second names of tied weights, and buffers as the workers' mean."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """The moving average of the parameters, if one was kept (`ema`)."""
    layers: tuple[str, ...] = ()
    """The layers, bottom first, if workers read and pushed layer by layer."""
    evaluated: str = ON_SERVERS
    """Which parameters history and model are of."""
    consensus: list[tuple[float, float]] = field(default_factory=list)
    """Without servers: when, and how far peers' parameters were from their average, in the mean. Live: at the end."""
    config: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Live: workers that ended with an error, in words."""
    server_changes: list[ServerChange] = field(default_factory=list)
    """Live: how the number of servers has changed."""

    @cached_property
    def metrics(self) -> Metrics:
        return measure(self.trace, self.time_s)

    @cached_property
    def barriers(self) -> list[Barrier]:
        """The planned barriers that were reached; none under a policy that does not plan."""
        return barriers(self.trace)

    @property
    def diverged(self) -> bool:
        """Whether its last loss is no number any more."""
        losses = [point.loss for point in self.history if point.loss is not None]
        return bool(losses) and not math.isfinite(losses[-1])

    @property
    def imbalance(self) -> float:
        """How many times the mean the largest server's slice is; 1 when all are equal."""
        return imbalance(self.trace.header.slice_bytes)

    def model(self) -> dict[str, Tensor]:
        """Everything the model's `load_state_dict` needs."""
        return {**self.parameters, **self.others}

    def averaged_model(self) -> dict[str, Tensor]:
        """The model with the moving average of its parameters in their place."""
        return {**self.model(), **self.average}

    def replay(self) -> list[Divergence]:
        """Feed the recorded events into fresh machines; the steps that came out differently (none, that is)."""

        def machine_of(node: Node, header: Header) -> Machine:
            return policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)

        return replay(self.trace, machine_of)

    def staleness_by_layer(self) -> dict[str, dict[str, float]]:
        """Of each layer's gradients, bottom first (004, Table 1); empty unless the run was by layer."""
        by_shard = staleness_by_shard(self.trace)
        return {name: by_shard[shard] for shard, name in enumerate(self.layers) if shard in by_shard}

    def summary(self) -> dict[str, Any]:
        """The run as plain data: one element of "runs" in the JSON of `compare` and `simulate`."""
        metrics = self.metrics
        last = self.history[-1] if self.history else Point(0.0, 0, None, None)
        return {
            "policy": self.policy,
            "time_to_target_s": self.time_to_target_s,
            "iterations": metrics.iterations,
            "updates": metrics.updates,
            "time_s": self.time_s,
            "wait_share": metrics.wait_share,
            "dpr_per_100": metrics.dpr_per_100,
            "staleness": metrics.staleness,
            "dropped": metrics.dropped,
            "bytes": metrics.bytes,
            **({"aborts": metrics.aborts} if metrics.aborts else {}),
            "slices": {"bytes": list(self.trace.header.slice_bytes), "imbalance": self.imbalance},
            **({"diverged": True} if self.diverged else {}),
            "evaluated": self.evaluated,
            **({"distance": _finite(self.consensus[-1][1])} if self.consensus else {}),
            "final": {"loss": _finite(last.loss), "accuracy": _finite(last.accuracy)},
            **({"barriers": totals(self.barriers)} if self.barriers else {}),
            **({"server_changes": [each._asdict() for each in self.server_changes]} if self.server_changes else {}),
            **({"staleness_by_layer": self.staleness_by_layer()} if self.layers else {}),
        }

    def view(self) -> RunView:
        """The run as the report needs it."""
        history = [
            {**point._asdict(), "loss": _finite(point.loss), "accuracy": _finite(point.accuracy)}
            for point in self.history
        ]
        lanes = spans(self.trace, self.time_s)
        return RunView(
            self.policy,
            self.runtime,
            history,
            self.summary(),
            lanes,
            self.barriers,
            self.peers(),
            self.metrics.staleness_counts,
        )

    def peers(self) -> PeersView | None:
        """How far apart the peers were, and might have been; None where there were servers."""
        workers = self.trace.header.members.workers
        policy = policies.parse(self.policy) if not self.trace.header.members.servers else None
        if not isinstance(policy, PeerPolicy):
            return None
        try:
            graph = policy.topology(workers)
        except ConfigError:  # it was in a file that is gone
            return peers_view(self.trace, self.consensus, None, None)
        away = distances(graph)
        bound = max((policy.most_ahead(away[i][j], away[j][i]) for i in away for j in away if i != j), default=0.0)
        max_gap = getattr(policy, "max_gap", None)
        most = max(map(len, neighbours(graph, frozenset(away)).ins.values()))
        room = None if max_gap is None else (1 + max_gap) * most
        return peers_view(self.trace, self.consensus, _finite(bound), room)

    def report(self, path: str | Path) -> Path:
        """Write the HTML report of this run."""
        write(Path(path), [self.view()], self.config)
        return Path(path)

    def chrome_trace(self, path: str | Path) -> Path:
        """Write a timeline that opens in Perfetto and chrome://tracing."""
        return write_whole(Path(path), chrome_trace([(self.policy, self.trace)]))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def write_whole(path: Path, data: bytes) -> Path:
    """Write beside the file, then rename: a reader never sees half of it."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a device or a pipe
        return path
    part = target.with_name(f".{target.name}.part")
    part.write_bytes(data)
    part.replace(target)
    return path
