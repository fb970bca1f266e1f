"""A run's numbers in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import math

from paceline.watching import snapshot as shown
from paceline.watching.snapshot import Snapshot

TYPE = "text/plain; version=0.0.4; charset=utf-8"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def exposition(view: Snapshot) -> str:
    """Returns the run's numbers; of each worker only a few, since a run may have a thousand."""
    lines: list[str] = []

    def family(name: str, kind: str, about: str, samples: list[tuple[dict[str, str], float]]) -> None:
        if samples:
            lines.extend((f"# HELP paceline_{name} {about}", f"# TYPE paceline_{name} {kind}"))
        for labels, value in samples:
            named = {"run": view.name, **labels}
            said = ",".join(f'{key}="{escaped(each)}"' for key, each in named.items())
            number = repr(float(value)) if math.isfinite(value) else "NaN"
            lines.append(f"paceline_{name}{{{said}}} {number}")

    present = [row for row in view.workers if row.state not in (shown.DONE, shown.GONE)]
    family("up", "gauge", "Whether the run goes on.", [({}, float(view.state == shown.RUNS))])
    family("time_seconds", "gauge", "Seconds since training began.", [({}, view.time_s)])
    family("gradients_per_second", "gauge", "Gradients of all workers.", [({}, view.gradients_per_s)])
    family("iteration", "gauge", "The least iteration of those that take part.", [({}, float(view.iteration))])
    family("workers", "gauge", "How many take part.", [({}, float(len(present)))])
    family("servers", "gauge", "How many servers there are.", [({}, float(view.servers))])
    family("wait_share", "gauge", "Share of waiting in the last minute.", [({}, view.wait_share)])
    family("dropped", "gauge", "Gradients dropped since it was first looked at.", [({}, float(view.dropped))])
    if view.staleness_mean is not None:
        family("staleness_mean", "gauge", "Mean staleness in the last minute.", [({}, view.staleness_mean)])
    family("bytes_per_second", "gauge", "Bytes of tensors.", [({"what": k}, v) for k, v in view.bytes_per_s.items()])
    by_worker = [({"worker": str(rank)}, seconds) for rank, seconds in view.waiting_by_worker]
    family("waiting_caused_seconds", "gauge", "Waiting of the last minute, by who was waited for.", by_worker)
    slow = [({"who": found.who, "cause": found.cause}, found.cost_s) for found in view.findings]
    family("slowed_down_seconds", "gauge", "What whoever slows the run down costs an iteration.", slow)
    lasts = [({"metric": name}, math.nan if points[-1][1] is None else points[-1][1])
             for name, points in view.metrics.items() if points]  # fmt: skip
    family("logged", "gauge", "The last value of each metric that scripts have logged.", lasts)
    return "\n".join(lines) + "\n"
