"""What a run leaves behind, virtual or live: history, metrics, trace, parameters, report."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline import policies, private_files
from paceline.core.machine import Machine
from paceline.core.messages import Node
from paceline.core.policy import PeerPolicy
from paceline.core.shard import Shard
from paceline.core.step_times import Row
from paceline.core.topology import distances, neighbours
from paceline.core.trace import Divergence, Header, Trace, replay
from paceline.errors import ConfigError
from paceline.metric_names import RESERVED, is_name
from paceline.report.barriers import Barrier, barriers, totals
from paceline.report.chrome import chrome_trace
from paceline.report.html import RunView, write
from paceline.report.labels import figure
from paceline.report.metrics import Metrics, measure, spans
from paceline.report.peers import PeersView, peers_view
from paceline.report.staleness import staleness_by_shard
from paceline.tensors.layout import imbalance

KNOWN_METRICS = ("accuracy", "loss")
"""The metrics that are known to get better upwards and downwards."""
RELATION = re.compile("(<=|>=|=)")
ON_SERVERS = "the parameters on the servers"
FINISHED, TARGET, STOPPED, INTERRUPTED, FAILED = "finished", "target", "stopped", "interrupted", "failed"
"""The ways a live run comes to its end: `Run.ended`."""


class Point(NamedTuple):
    """The model at one moment: seconds since the run began, optimizer steps, and what was measured or logged, by name.

    A simulation and `compare` measure loss and accuracy on the test set; a script logs what it likes.
    """

    time_s: float
    updates: int
    values: dict[str, float]

    @property
    def loss(self) -> float | None:
        return self.values.get("loss")

    @property
    def accuracy(self) -> float | None:
        return self.values.get("accuracy")

    def plain(self) -> dict[str, Any]:
        """Returns the point as one flat object of a JSON file."""
        return {"time_s": self.time_s, "updates": self.updates, **self.values}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Point:
        """Makes the point from what `plain` has returned."""
        values = {name: value for name, value in plain.items() if name not in RESERVED and value is not None}
        return cls(plain["time_s"], plain["updates"], values)


class ServerChange(NamedTuple):
    """The number of servers changed: when, from and to how many, and what share of the parameters moved.

    `held_s` lasts from the order to the workers to wait until the order to go on; in `moving_s`, its last part, nobody
    computes.
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
    """A run has learned enough when a metric is at least (">="), or at most ("<="), `value`.

    With "=" accuracy is to be at least that, loss at most; for other metrics "=" would be ambiguous.
    """

    metric: str
    value: float
    relation: str = "="

    @classmethod
    def parse(cls, text: str, metrics: tuple[str, ...] | None = None) -> Target:
        """Reads a target. `metrics` are those there will be, if that is known: a script logs what it likes."""
        if not isinstance(text, str):
            raise ConfigError(f"a target is a text like 'accuracy=0.95', got {text!r}")
        name, relation, number = (*map(str.strip, RELATION.split(text, maxsplit=1)), "", "")[:3]
        if not relation or not is_name(name) or (metrics is not None and name not in metrics):
            among = f" with METRIC one of {', '.join(metrics)}" if metrics is not None else ""
            raise ConfigError(f"unknown target {text!r}: write METRIC=VALUE, METRIC<=VALUE or METRIC>=VALUE{among}")
        if relation == "=" and name not in KNOWN_METRICS:
            either = f"{name}<={number} or {name}>={number}"
            raise ConfigError(f"the target {text!r} does not say which way: write {either} (in quotes, for the shell)")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"the target {text!r} needs a number after {name}{relation}") from None
        if not math.isfinite(value) or (name == "accuracy" and not 0 <= value <= 1):
            allowed = "from 0 to 1" if name == "accuracy" else "a finite number"
            raise ConfigError(f"the target {text!r} is out of range: {name} is {allowed}")
        return cls(name, value, relation)

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.value:g}"

    def reached(self, point: Point) -> bool:
        value = point.values.get(self.metric, math.nan)
        upwards = self.relation == ">=" or (self.relation == "=" and self.metric == "accuracy")
        return value >= self.value if upwards else value <= self.value


@dataclass(repr=False)
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
    """Says which parameters history and model are of."""
    consensus: list[tuple[float, float]] = field(default_factory=list)
    """Without servers: the mean distance of peers' parameters from their average, with its time; live at the end."""
    config: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Live: the errors of workers that ended with one, in words."""
    server_changes: list[ServerChange] = field(default_factory=list)
    """Live: the changes of the number of servers."""
    trace_is_whole: bool = True
    """False if a process had no room for the end of its trace: metrics are those of the part that is there."""
    times: list[Row] = field(default_factory=list)
    """Live: what iterations, and turns of servers, were spent on (`paceline.core.step_times`)."""
    wall: dict[str, float] = field(default_factory=dict)
    """Live: what the whole took, part by part in seconds: start-up, training (`time_s`), ending, evaluation,
    reporting."""
    ended: str = ""
    """Live: `FINISHED` (the scripts ended), `TARGET` (reached), `STOPPED` (by `paceline.stop`), `INTERRUPTED` or
    `FAILED` (a worker has)."""

    @cached_property
    def metrics(self) -> Metrics:
        return measure(self.trace, self.time_s)

    @cached_property
    def barriers(self) -> list[Barrier]:
        """Returns the planned barriers that were reached; none under a policy that does not plan."""
        return barriers(self.trace)

    @property
    def final(self) -> dict[str, float]:
        """The last value of each metric, by name."""
        return {name: value for point in self.history for name, value in point.values.items()}

    def outcome(self) -> str:
        """Says in one line what came of the run."""
        if self.target is None:
            said = f"{self.progress()} in {self.time_s:.2f} s"
        elif self.time_to_target_s is None:
            said = f"missed {self.target} in {self.time_s:.2f} s"
        else:
            said = f"reached {self.target} after {self.time_to_target_s:.2f} s"
        final = self.final
        wanted = [self.target.metric] if self.target is not None else []
        if name := next((name for name in (*wanted, *KNOWN_METRICS, *final) if name in final), None):
            said += f", {name} {figure(name, final[name])}"
        return said + (f", diverged at iteration {self.metrics.iterations}" if self.diverged else "")

    def progress(self) -> str:
        """Says how far each worker has come, in the mean."""
        rounds, steps = self.metrics.iterations, self.metrics.local_steps
        if not steps:
            return f"{rounds} iterations"
        return f"{round(steps / self.trace.header.members.workers)} local steps in {rounds} rounds"

    def __repr__(self) -> str:
        return f"<Run {self.policy}, {self.runtime}: {self.outcome()}>"

    @property
    def diverged(self) -> bool:
        """Whether the last loss is no number any more."""
        return not math.isfinite(self.final.get("loss", 0.0))

    @property
    def imbalance(self) -> float:
        """Returns how many times the mean the largest server's slice is; 1 when all are equal."""
        return imbalance(self.trace.header.slice_bytes)

    def model(self) -> dict[str, Tensor]:
        """Returns everything the model's `load_state_dict` needs."""
        return {**self.parameters, **self.others}

    def averaged_model(self) -> dict[str, Tensor]:
        """Returns the model with the moving average of its parameters in their place."""
        return {**self.model(), **self.average}

    def replay(self) -> list[Divergence]:
        """Feeds the recorded events into fresh machines, and returns the steps that came out differently: none."""

        def machine_of(node: Node, header: Header) -> Machine:
            machine = policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)
            if isinstance(machine, Shard):
                machine.clips_mean = header.clips_mean
            return machine

        return replay(self.trace, machine_of)

    def staleness_by_layer(self) -> dict[str, dict[str, float]]:
        """Returns the staleness of each layer's gradients, bottom first (Chen et al. 2016, Table 1); empty unless by
        layer."""
        by_shard = staleness_by_shard(self.trace)
        return {name: by_shard[shard] for shard, name in enumerate(self.layers) if shard in by_shard}

    def summary(self) -> dict[str, Any]:
        """Returns the run as plain data: one element of "runs" in the JSON of `compare` and `simulate`."""
        metrics = self.metrics
        return {
            "policy": self.policy,
            "time_to_target_s": self.time_to_target_s,
            "iterations": metrics.iterations,
            "gradients": metrics.gradients,
            "updates": metrics.updates,
            "time_s": self.time_s,
            "wait_share": metrics.wait_share,
            "dpr_per_100": metrics.dpr_per_100,
            "staleness": metrics.staleness,
            "dropped": metrics.dropped,
            "bytes": metrics.bytes,
            **({"local_steps": metrics.local_steps} if metrics.local_steps else {}),
            "slowest_worker": metrics.slowest_worker,
            **({"aborts": metrics.aborts} if metrics.aborts else {}),
            "slices": {"bytes": list(self.trace.header.slice_bytes), "imbalance": self.imbalance},
            **({"diverged": True} if self.diverged else {}),
            "evaluated": self.evaluated,
            **({"distance": _finite(self.consensus[-1][1])} if self.consensus else {}),
            "final": {
                "loss": None,
                "accuracy": None,
                **{name: _finite(value) for name, value in self.final.items()},
            },
            **({"barriers": totals(self.barriers)} if self.barriers else {}),
            **({"server_changes": [each._asdict() for each in self.server_changes]} if self.server_changes else {}),
            **({"wall": self.wall} if self.wall else {}),
            **({"staleness_by_layer": self.staleness_by_layer()} if self.layers else {}),
        }

    def view(self) -> RunView:
        """Returns the run as the report needs it."""
        history = [{name: _finite(value) for name, value in point.plain().items()} for point in self.history]
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
        """Returns how far apart the peers were, and might have been; None where there were servers."""
        workers = self.trace.header.members.workers
        policy = policies.parse(self.trace.header.policy) if not self.trace.header.members.servers else None
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
        """Writes the HTML report of this run."""
        write(Path(path), [self.view()], self.config)
        return Path(path)

    def chrome_trace(self, path: str | Path) -> Path:
        """Writes a timeline that opens in Perfetto and chrome://tracing."""
        return write_whole(Path(path), chrome_trace([(self.policy, self.trace)]))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def write_whole(path: Path, data: bytes, private: bool = False) -> Path:
    """Writes beside the file, then renames: a reader never sees half of it. One that is `private` has mode 0600."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a device or a pipe
        return path
    part = target.with_name(f".{target.name}.part")
    try:
        (private_files.write if private else Path.write_bytes)(part, data)
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path
