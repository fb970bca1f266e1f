"""matrix-factorization: who likes which film, as the product of two thin matrices.

A rating is guessed as the mean of all, what is usual for the user, what is usual for the film, and the product of
their two vectors. The data are MovieLens's `u.data` (user, film, rating, time; tabs between) if PACELINE_DATA names
a folder that has it, else ratings made from a random low-rank matrix and noise. The result says which.
All parameters are matrices, so every optimizer can train it, Muon too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.workloads.base import Data, Workload
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.data_files import find, folders, read_bytes

RANK = 8
TEST_SHARE = 0.1
USERS, FILMS, RATINGS, NOISE = 300, 200, 12_000, 0.3


class Factorization(nn.Module):
    """The product of two thin matrices. `mean` is the mean rating of the training set."""

    def __init__(self, users: int, films: int, mean: float) -> None:
        super().__init__()
        self.mean = mean
        self.user, self.film = nn.Embedding(users, RANK), nn.Embedding(films, RANK)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for vectors in (self.user, self.film):
            nn.init.normal_(vectors.weight, std=0.3)
        for bias in (self.user_bias, self.film_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        user, film = pairs[:, 0], pairs[:, 1]
        usual: Tensor = self.mean + self.user_bias(user)[:, 0] + self.film_bias(film)[:, 0]
        product: Tensor = (self.user(user) * self.film(film)).sum(1)
        return usual + product


@dataclass(frozen=True)
class MatrixFactorization(WorkloadSpec):
    """Ratings as the product of two thin matrices."""

    name: ClassVar[str] = "matrix-factorization"

    def make(self) -> Workload:
        path = find("u.data", folders("ml-100k"))
        pairs, ratings = read_ratings(path) if path is not None else low_rank()
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        test, train = order.split([math.ceil(TEST_SHARE * len(order)), len(order) - math.ceil(TEST_SHARE * len(order))])
        users, films = (int(number) + 1 for number in pairs.amax(0))
        mean = ratings[train].mean().item()
        return Workload(
            name=str(self),
            make_module=lambda: Factorization(users, films, mean),
            loss=nn.functional.mse_loss,
            train=(pairs[train], ratings[train]),
            test=(pairs[test], ratings[test]),
            batch=64,
            optimizer="adam:lr=0.03",
            metrics=("loss",),
            data=f"{len(pairs)} ratings of {path}" if path is not None else f"{len(pairs)} synthetic low-rank ratings",
        )


def read_ratings(path: Path) -> Data:
    """Reads MovieLens's lines. Users and films are numbered anew from 0, in the order of their own numbers."""
    users, films, ratings = [], [], []
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            user, film, rating = line.split()[:3]
            users.append(int(user))
            films.append(int(film))
            ratings.append(float(rating))
        except ValueError:
            raise ConfigError(f"{path}:{number} is not 'user film rating time' with tabs between: {line!r}") from None
    if len(ratings) < 10:
        raise ConfigError(f"{str(path)!r} has {len(ratings)} ratings: 10 or more are needed")
    columns = [torch.unique(torch.tensor(column), return_inverse=True)[1] for column in (users, films)]
    return torch.stack(columns, 1), torch.tensor(ratings)


def low_rank() -> Data:
    """Returns ratings of pairs drawn without repetition, from two random thin matrices and noise."""
    generator = torch.Generator().manual_seed(0)
    taste, style = (torch.randn(count, RANK // 2, generator=generator) for count in (USERS, FILMS))
    kind = torch.randn(FILMS, generator=generator)
    cells = torch.randperm(USERS * FILMS, generator=generator)[:RATINGS]
    user, film = cells // FILMS, cells % FILMS
    liking = (taste[user] * style[film]).sum(1) / math.sqrt(RANK // 2) + 0.5 * kind[film]
    noise = NOISE * torch.randn(RATINGS, generator=generator)
    return torch.stack([user, film], 1), 3 + liking + noise
