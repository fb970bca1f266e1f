"""Small training jobs: a model, data, a loss. `load("digits-mlp")` makes one, `load("./mine.py:Mine")` your own."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from paceline import user_code
from paceline.errors import ConfigError
from paceline.workloads.base import Workload, own
from paceline.workloads.digits import digits_cnn, digits_mlp
from paceline.workloads.factorization import matrix_factorization
from paceline.workloads.fashion import fashion_cnn
from paceline.workloads.quadratic import quadratic
from paceline.workloads.svm import svm

CATALOGUE: dict[str, Callable[[], Workload]] = {
    "digits-mlp": digits_mlp,
    "digits-cnn": digits_cnn,
    "fashion-cnn": fashion_cnn,
    "matrix-factorization": matrix_factorization,
    "svm": svm,
    "quadratic": quadratic,
}


def load(workload: str | Workload) -> Workload:
    """Makes a workload by name or from a user's file (FILE.py:NAME); a workload object is returned as it is."""
    if isinstance(workload, Workload):
        return workload
    if not isinstance(workload, str):
        raise ConfigError(f"a workload is a text like 'digits-mlp' or a Workload, got {workload!r}")
    if user_code.names_a_file(workload):
        return own(workload)
    if workload not in CATALOGUE:
        near = get_close_matches(workload, CATALOGUE, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown workload {workload!r}{hint} (known: {', '.join(CATALOGUE)}, or FILE.py:NAME)")
    return CATALOGUE[workload]()


__all__ = ["CATALOGUE", "Workload", "load"]
