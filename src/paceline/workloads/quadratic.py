"""quadratic: least squares with a known optimum, for tests: what SGD does on it can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from paceline.workloads.base import Workload
from paceline.workloads.catalogue_entry import WorkloadSpec

FEATURES = 6


@dataclass(frozen=True)
class Quadratic(WorkloadSpec):
    """Least squares with a known optimum."""

    name: ClassVar[str] = "quadratic"

    def make(self) -> Workload:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, FEATURES, generator=generator, dtype=torch.float64)
        optimum = torch.arange(1.0, FEATURES + 1, dtype=torch.float64)
        y = (x @ optimum).unsqueeze(1)
        data = (x.float(), y.float())
        return Workload(
            name=str(self),
            make_module=lambda: nn.Linear(FEATURES, 1, bias=False),
            loss=nn.functional.mse_loss,
            train=data,
            test=data,
            batch=8,
            optimizer="sgd:lr=0.05",
            metrics=("loss",),
        )
