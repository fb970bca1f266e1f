"""The optimizer that steps on what rounds of local steps have learned, from its text (`core/local_steps.py`).

average                        the model becomes the mean of what the workers have come to: SGD with rate 1
nesterov(lr=0.7,momentum=0.9)  SGD with Nesterov momentum, the default (DiLoCo, Douillard et al. 2023);
                                   delayed where pushes are applied on arrival (`nesterov.py`, Liu et al. 2024)
sgd(lr=0.5), adam(lr=0.1) ...  any optimizer that servers have (`optimizer_catalogue.py`)
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline.core import spec
from paceline.core.local_steps import LocalSteps
from paceline.errors import ConfigError
from paceline.tensors import optimizers
from paceline.tensors.optimizers import OptimizerSpec

SHORT = {"average": "sgd:lr=1"}
"""Names of their own, and what they stand for."""


def parse_outer(text: str) -> OptimizerSpec:
    """Reads the text of an outer optimizer; refuses, in one line, what servers cannot step with."""
    name, arguments = spec.split(text)
    if name == "average" and arguments.keys() & {"lr", "momentum", "nesterov"}:
        raise ConfigError(f"outer={text}: average has the rate 1 and no momentum; sgd takes others")
    written, between = SHORT.get(name, name), "," if name in SHORT else ":"
    for key, value in arguments.items():
        written += f"{between}{key}={value}"
        between = ","
    try:
        parsed = optimizers.parse(written)
    except ConfigError as error:
        raise ConfigError(f"outer={text}: {error}") from None
    refused = [key for key in ("clip", "schedule") if getattr(parsed.extras, key) is not None]
    if refused:
        raise ConfigError(f"outer={text}: {refused[0]} is for the local steps, say it of the inner optimizer")
    return parsed


def inner_and_outer(optimizer: OptimizerSpec, local: LocalSteps) -> tuple[OptimizerSpec, OptimizerSpec]:
    """Returns what each worker steps with, and what the servers do, of a run whose optimizer is this.

    Clipping, schedules and the learning rate act on the local steps; a moving average is of the servers' parameters.
    """
    extras = optimizer.extras
    if extras.clip_mean is not None:
        raise ConfigError(
            f"clip_mean={extras.clip_mean:g} bounds the mean of gradients, and with {local} there is none: clip bounds "
            f"the gradient of each local step, and outer=sgd(lr=1,clip_mean=1) what rounds have learned"
        )
    outer = parse_outer(local.outer)
    if extras.ema is not None and outer.extras.ema is None:
        outer = replace(outer, extras=replace(outer.extras, ema=extras.ema))
    outer = replace(outer, groups=outer.groups * len(optimizer.groups))
    return replace(optimizer, extras=replace(extras, ema=None)), outer


def borders_of(inner: OptimizerSpec, outer: OptimizerSpec) -> str:
    """Returns where slices may begin and end, so that both can step them."""
    return "tensors" if "tensors" in (inner.borders, outer.borders) else outer.borders
