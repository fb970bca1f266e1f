"""matrix-factorization: who likes which film, as the product of two thin matrices.

A rating is guessed as the mean of all, what is usual for the user, what is usual for the film, and the product of
their two vectors. The data are MovieLens's `u.data` (user, film, rating, time; tabs between) if PACELINE_DATA names
a folder that has it, else ratings made from a random low-rank matrix and noise. The result says which. With
`data=100k`, `1m` or `10m` they are made, as many users, films and ratings as MovieLens's set of that name has.
All parameters are matrices, so every optimizer can train it, Muon too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.core.spec import option
from paceline.errors import ConfigError
from paceline.workloads.base import Data, Workload
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.data_files import find, folders, read_bytes

TEST_SHARE = 0.1
TRUE_RANK, NOISE = 4, 0.3
FOUND = "found"
SIZES = {FOUND: (300, 200, 12_000), "100k": (943, 1682, 100_000), "1m": (6040, 3706, 1_000_209),
         "10m": (69_878, 10_677, 10_000_054)}  # fmt: skip
"""Users, films and ratings of what is made; of `found`, if nothing is."""
LISTED = 1 << 24
"""Some of up to so many numbers are drawn from a list of all; some of more, one by one until there are enough."""


class Factorization(nn.Module):
    """The product of two thin matrices. `mean` is the mean rating of the training set."""

    def __init__(self, users: int, films: int, mean: float, rank: int) -> None:
        super().__init__()
        self.mean = mean
        self.user, self.film = nn.Embedding(users, rank), nn.Embedding(films, rank)
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

    data: str = option(FOUND, choices=tuple(SIZES), doc="u.data if it is found, or synthetic ratings of this size")
    rank: int = option(8, low=1, high=1024, doc="columns of the two matrices")

    def make(self) -> Workload:
        path = find("u.data", folders("ml-100k")) if self.data == FOUND else None
        pairs, ratings = read_ratings(path) if path is not None else low_rank(*SIZES[self.data])
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        test, train = order.split([math.ceil(TEST_SHARE * len(order)), len(order) - math.ceil(TEST_SHARE * len(order))])
        users, films = (int(number) + 1 for number in pairs.amax(0))
        mean = ratings[train].mean().item()
        return Workload(
            name=str(self),
            make_module=partial(Factorization, users, films, mean, self.rank),
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


def low_rank(users: int, films: int, ratings: int) -> Data:
    """Returns ratings of pairs drawn without repetition, from two random thin matrices and noise."""
    generator = torch.Generator().manual_seed(0)
    taste, style = (torch.randn(count, TRUE_RANK, generator=generator) for count in (users, films))
    kind = torch.randn(films, generator=generator)
    cells = draw_without_repetition(users * films, ratings, generator)
    user, film = cells // films, cells % films
    liking = (taste[user] * style[film]).sum(1) / math.sqrt(TRUE_RANK) + 0.5 * kind[film]
    noise = NOISE * torch.randn(ratings, generator=generator)
    return torch.stack([user, film], 1), 3 + liking + noise


def draw_without_repetition(among: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` different numbers below `among`, in random order."""
    if among <= LISTED:
        return torch.randperm(among, generator=generator)[:count]
    drawn = torch.empty(0, dtype=torch.long)
    while len(drawn) < count:
        drawn = torch.cat([drawn, torch.randint(among, (count + count // 8,), generator=generator)]).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]
