"""The optimizer that steps on what rounds of local steps have learned, from its text (`core/local_steps.py`).

average                        the model becomes the mean of what the workers have come to: SGD with rate 1
nesterov(lr=0.7,momentum=0.9)  SGD with Nesterov momentum, the default (DiLoCo, Douillard et al. 2023)
sgd(lr=0.5), adam(lr=0.1) ...  any optimizer that servers have (`optimizer_catalogue.py`)
"""

from __future__ import annotations

from paceline.core import spec
from paceline.errors import ConfigError
from paceline.tensors import optimizers
from paceline.tensors.optimizers import OptimizerSpec

SHORT = {"average": "sgd:lr=1", "nesterov": "sgd:nesterov=true"}
"""Names of their own, and what they stand for."""
NESTEROV = {"lr": "0.7", "momentum": "0.9"}


def parse_outer(text: str) -> OptimizerSpec:
    """Reads the text of an outer optimizer; refuses, in one line, what servers cannot step with."""
    name, arguments = spec.split(text)
    if name == "average" and arguments.keys() & {"lr", "momentum", "nesterov"}:
        raise ConfigError(f"outer={text}: average has the rate 1 and no momentum; sgd takes others")
    if name == "nesterov":
        arguments = NESTEROV | arguments
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
