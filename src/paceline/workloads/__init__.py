"""Small training jobs that ship with paceline: a model, real data, a loss. `load("digits-mlp")` makes one."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from paceline.errors import ConfigError
from paceline.workloads.base import Workload
from paceline.workloads.digits import digits_mlp
from paceline.workloads.quadratic import quadratic

CATALOGUE: dict[str, Callable[[], Workload]] = {"digits-mlp": digits_mlp, "quadratic": quadratic}


def load(workload: str | Workload) -> Workload:
    """A workload by name; a workload object is returned as it is."""
    if isinstance(workload, Workload):
        return workload
    if workload not in CATALOGUE:
        near = get_close_matches(workload, CATALOGUE, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown workload {workload!r}{hint} (known: {', '.join(CATALOGUE)})")
    return CATALOGUE[workload]()


__all__ = ["CATALOGUE", "Workload", "load"]
