"""Learning-rate schedules that count samples, not steps (Chen et al. 2016, A.3).

A step is one of N under BSP and N of N under ASP, so what a schedule in steps does depends on the policy; samples
mean the same in all. Each server counts those its steps have used (a dropped gradient's do not count) and
multiplies the learning rate by the factor below. Text forms nest in an optimizer's:
`sgd:lr=0.1,schedule=cosine(samples=60000)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.core import spec
from paceline.core.spec import Spec, parameter


@dataclass(frozen=True)
class Schedule(Spec):
    """The learning rate as it is given; with `warmup` it first rises from 0 over so many samples."""

    name: ClassVar[str] = "constant"
    kind: ClassVar[str] = "schedule"
    warmup: int = parameter(0, low=0, doc="samples over which the learning rate first rises from 0")

    def factor(self, samples: int) -> float:
        """Returns what the learning rate is multiplied by when so many samples have been used."""
        if samples < self.warmup:
            return samples / self.warmup
        return self.after(samples - self.warmup)

    def after(self, samples: int) -> float:
        """Returns the factor so many samples after the warm-up."""
        return 1.0


@dataclass(frozen=True)
class Staircase(Schedule):
    """The rate is multiplied by `gamma` after every `every` samples (Chen et al. 2016, A.3: 0.94 every two epochs)."""

    name: ClassVar[str] = "staircase"
    every: int = parameter(50_000, low=1, doc="samples from one stair to the next")
    gamma: float = parameter(0.94, low=0, high=1, doc="what each stair multiplies by")

    def after(self, samples: int) -> float:
        return self.gamma ** (samples // self.every)


@dataclass(frozen=True)
class Exponential(Schedule):
    """The rate is multiplied by `gamma` smoothly over every `every` samples."""

    name: ClassVar[str] = "exponential"
    every: int = parameter(50_000, low=1, doc="samples over which it is multiplied once")
    gamma: float = parameter(0.94, low=0.000001, high=1, doc="what it is multiplied by")

    def after(self, samples: int) -> float:
        return float(self.gamma ** (samples / self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """The rate falls to `last` along half a cosine, over so many samples; then it stays there."""

    name: ClassVar[str] = "cosine"
    samples: int = parameter(60_000, low=1, doc="samples the way down takes")
    last: float = parameter(0.0, low=0, high=1, doc="the factor at the end")

    def after(self, samples: int) -> float:
        way = min(1.0, samples / self.samples)
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * way)) / 2


@dataclass(frozen=True)
class Linear(Schedule):
    """The rate falls to `last` along a straight line, over so many samples; then it stays there."""

    name: ClassVar[str] = "linear"
    samples: int = parameter(60_000, low=1, doc="samples the way down takes")
    last: float = parameter(0.0, low=0, high=1, doc="the factor at the end")

    def after(self, samples: int) -> float:
        return 1.0 - (1 - self.last) * min(1.0, samples / self.samples)


CATALOGUE: dict[str, type[Schedule]] = {each.name: each for each in (Schedule, Staircase, Exponential, Cosine, Linear)}


def parse(text: str) -> Schedule:
    return spec.parse(text, CATALOGUE, "schedule")
