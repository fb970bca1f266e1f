"""Small training jobs: a model, data, a loss. `load("digits-mlp")` makes one, `load("./mine.py:Mine")` your own."""

from __future__ import annotations

from paceline import user_code
from paceline.core import spec
from paceline.errors import ConfigError
from paceline.workloads.base import Workload, own
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.characters import CharTransformer
from paceline.workloads.digits import DigitsCNN, DigitsMLP
from paceline.workloads.factorization import MatrixFactorization
from paceline.workloads.fashion import FashionCNN, FashionResNet20, FashionVGG
from paceline.workloads.quadratic import Quadratic
from paceline.workloads.svm import SVM

IMAGES = (DigitsMLP, DigitsCNN, FashionCNN, FashionResNet20, FashionVGG)
BUNDLED = (*IMAGES, CharTransformer, MatrixFactorization, SVM, Quadratic)
CATALOGUE: dict[str, type[WorkloadSpec]] = {entry.name: entry for entry in BUNDLED}


def load(workload: str | Workload) -> Workload:
    """Makes a workload by name or from a user's file (FILE.py:NAME); a workload object is returned as it is."""
    if isinstance(workload, Workload):
        return workload
    if not isinstance(workload, str):
        raise ConfigError(f"a workload is a text like 'digits-mlp' or a Workload, got {workload!r}")
    if user_code.names_a_file(workload):
        return own(workload)
    return spec.parse(workload, CATALOGUE, "workload").make()


__all__ = ["CATALOGUE", "Workload", "load"]
