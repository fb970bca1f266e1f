"""digits-mlp: scikit-learn's 1 797 handwritten digits (8 x 8, real data, in the package), a 64-64-10 MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.workloads.base import Workload

TEST_SAMPLES = 360


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, test) as (images in [0, 1], labels), split by a fixed permutation."""
    try:
        from sklearn.datasets import load_digits as from_sklearn
    except ImportError:
        raise ConfigError(
            "the digits data come with scikit-learn, which is not installed: pip install 'paceline[data]'"
        ) from None
    images, labels = from_sklearn(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return (x[train], y[train]), (x[test], y[test])


def digits_mlp() -> Workload:
    train, test = load_digits()
    return Workload(
        name="digits-mlp",
        make_module=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        batch=32,
        optimizer="sgd:lr=0.1",
    )
