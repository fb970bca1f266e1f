"""Which optimizers may run on the servers, and what is peculiar to each. Names come from this list and nowhere else.

*Elementwise* ones treat every number by itself: a slice may begin and end anywhere within a tensor. Those that look
at a *whole* tensor (its norm, its rows, its singular vectors) need slices on tensor borders.

A step on one of N gradients must move the parameters 1/N as far. For most kinds the step is in proportion to the
learning rate, so that is scaled. Where it is not (`blended`) the whole step is taken and then 1/N of it kept; one that
is `weighted` knows by itself what to do.
`stretched` names the hyper-parameters that say how fast the optimizer forgets: see `Extras.stretch`. Adadelta and RAdam
have such, but what they do in their first steps depends on the number of steps besides, so stretching misleads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.errors import ConfigError
from paceline.tensors.lars import LARS
from paceline.tensors.nesterov import Nesterov


class CatalogueEntry(NamedTuple):
    cls: type[torch.optim.Optimizer]
    stretched: tuple[str, ...] = ()
    whole: bool = False
    blended: bool = False
    matrices: bool = False
    """Whether it takes tensors of two dimensions only."""
    weighted: bool = False
    """Whether it is told the weight of a step, and scales by itself."""


CATALOGUE: dict[str, CatalogueEntry] = {
    "sgd": CatalogueEntry(torch.optim.SGD, ("momentum",)),
    "adam": CatalogueEntry(torch.optim.Adam, ("betas",)),
    "adamw": CatalogueEntry(torch.optim.AdamW, ("betas",)),
    "adagrad": CatalogueEntry(torch.optim.Adagrad),
    "rmsprop": CatalogueEntry(torch.optim.RMSprop, ("alpha",)),
    "adadelta": CatalogueEntry(torch.optim.Adadelta),
    "adamax": CatalogueEntry(torch.optim.Adamax, ("betas",)),
    "nadam": CatalogueEntry(torch.optim.NAdam, ("betas",)),
    "radam": CatalogueEntry(torch.optim.RAdam),
    "asgd": CatalogueEntry(torch.optim.ASGD, blended=True),
    "rprop": CatalogueEntry(torch.optim.Rprop, blended=True),
    "nesterov": CatalogueEntry(Nesterov, weighted=True),
    "lars": CatalogueEntry(LARS, ("momentum",), whole=True),
}
if hasattr(torch.optim, "Adafactor"):
    CATALOGUE["adafactor"] = CatalogueEntry(torch.optim.Adafactor, whole=True, blended=True)
if hasattr(torch.optim, "Muon"):  # torch 2.9 and newer
    CATALOGUE["muon"] = CatalogueEntry(torch.optim.Muon, ("momentum",), whole=True, matrices=True)

REFUSED = {
    "lbfgs": "it needs several gradients for one step, and a server gets one",
    "sparseadam": "it takes sparse gradients, and only dense ones are sent",
}


def named(name: str) -> CatalogueEntry:
    """Returns the entry of this name, or refuses the name in one line."""
    if name in REFUSED:
        raise ConfigError(f"the optimizer {name} cannot run on the servers: {REFUSED[name]}")
    if name not in CATALOGUE:
        raise ConfigError(f"unknown optimizer {name!r} (known: {', '.join(CATALOGUE)})")
    return CATALOGUE[name]


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of a user's optimizer, or refuses it. A subclass may do anything, so it is not its base."""
    cls = type(optimizer)
    name = cls.__name__.lower()
    if name in CATALOGUE and CATALOGUE[name].cls is cls:
        return name
    if cls.__module__.startswith("torch.optim") and name in REFUSED:
        reason = REFUSED[name]
    else:
        reason = f"these can: {', '.join(kind.cls.__name__ for kind in CATALOGUE.values())}"
    raise ConfigError(f"{cls.__module__}.{cls.__name__} cannot run on the servers: {reason}")
