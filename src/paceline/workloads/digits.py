"""digits-mlp and digits-cnn: scikit-learn's 1 797 handwritten digits (8 x 8, real data, in the package).

The MLP is 64-64-10; the CNN has two small convolutions, the second one with a stride.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.errors import ConfigError
from paceline.workloads.base import Data, Workload
from paceline.workloads.catalogue_entry import WorkloadSpec

TEST_SAMPLES = 360
FILE = "datasets/data/digits.csv.gz"
"""The file in scikit-learn's folder."""


def load_digits() -> tuple[Data, Data]:
    """Returns (train, test) as (images in [0, 1], labels), split by a fixed permutation."""
    x, y = torch.from_numpy(_table()).split([64, 1], dim=1)
    x, y = x.float() / 16.0, y.flatten().long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return (x[train], y[train]), (x[test], y[test])


def _table() -> NDArray[np.float32]:
    """Returns a row for each image: 64 pixels from 0 to 16, then the digit.

    It reads the package's file: importing scikit-learn takes a second, in every worker.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the digits data come with scikit-learn, which is not installed: pip install 'paceline[data]'"
        )
    file = Path(package.submodule_search_locations[0], FILE)
    if file.exists():
        return np.loadtxt(file, delimiter=",", dtype=np.float32)
    from sklearn.datasets import load_digits as from_sklearn  # another version may keep it elsewhere

    images, labels = from_sklearn(return_X_y=True)
    return np.column_stack([images, labels]).astype(np.float32)


@dataclass(frozen=True)
class DigitsMLP(WorkloadSpec):
    """scikit-learn's 1 797 digits and a network of one hidden layer."""

    name: ClassVar[str] = "digits-mlp"

    def make(self) -> Workload:
        train, test = load_digits()
        return Workload(
            name=str(self),
            make_module=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            loss=nn.functional.cross_entropy,
            train=train,
            test=test,
            batch=32,
            optimizer="sgd:lr=0.1",
        )


@dataclass(frozen=True)
class DigitsCNN(WorkloadSpec):
    """The same digits and two small convolutions."""

    name: ClassVar[str] = "digits-cnn"

    def make(self) -> Workload:
        (train_x, train_y), (test_x, test_y) = load_digits()
        return Workload(
            name=str(self),
            make_module=small_cnn,
            loss=nn.functional.cross_entropy,
            train=(train_x.view(-1, 1, 8, 8), train_y),
            test=(test_x.view(-1, 1, 8, 8), test_y),
            batch=32,
            optimizer="sgd:lr=0.1,momentum=0.9",
        )


def small_cnn() -> nn.Module:
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))
