"""Local steps at the front door: what `paceline.Optimizer` makes of them, and rounds in a world of one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from msgspec import structs
from torch import Tensor

from paceline.core.local_steps import LocalSteps
from paceline.core.rounds import Rounds
from paceline.errors import ConfigError
from paceline.tensors.optimizers import Extras, OptimizerSpec
from paceline.tensors.outer_optimizers import parse_outer
from paceline.tensors.piece_optimizers import Hyper

FOR_THE_OUTER = ("clip_mean", "stretch")
"""Options that say how servers step; with local steps their optimizer is the outer one."""
AVERAGE: dict[str, Hyper] = {
    "sgd": {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "nesterov": {"lr": 1.0, "momentum": 0.0},
}
"""What makes an optimizer take the weighted mean of what workers have: for buffers."""


def check_options(extras: Extras, overlap: bool) -> None:
    """Refuses, in one line, what cannot be had with local steps."""
    if overlap:
        raise ConfigError("overlap=True sends gradients while backward runs: with local steps they are not sent")
    for name in FOR_THE_OUTER:
        if value := getattr(extras, name):
            said = str(value).lower() if isinstance(value, bool) else f"{value:g}"
            raise ConfigError(
                f"{name} is what servers do: with local steps say it of their optimizer, as "
                f"outer=nesterov({name}={said})"
            )


def outer_of(local: LocalSteps, extras: Extras, groups: int, buffers: bool = False) -> OptimizerSpec:
    """Returns the outer optimizer for a model of so many parameter groups, and one more that is for `buffers`."""
    spec = parse_outer(local.outer)
    if extras.ema is not None and spec.extras.ema is None:
        spec = structs.replace(spec, extras=structs.replace(spec.extras, ema=extras.ema))
    (hyper,) = spec.groups
    last = (hyper | AVERAGE[spec.name],) if buffers else ()
    return structs.replace(spec, groups=(hyper,) * groups + last)


def averaged_buffers(
    local: LocalSteps, buffers: Mapping[str, Tensor], trained: Sequence[Tensor]
) -> list[tuple[str, Tensor]]:
    """Returns the buffers that travel with the parameters: floats of their kind, if the outer optimizer can average."""
    if parse_outer(local.outer).name not in AVERAGE or not trained:
        return []
    dtype, place = trained[0].dtype, trained[0].device
    return [each for each in buffers.items() if each[1].dtype == dtype and each[1].device == place]


class RoundsAlone:
    """Rounds of local steps in a world of one: the outer optimizer steps here, on what each round has learned."""

    def __init__(self, inner: torch.optim.Optimizer, local: LocalSteps) -> None:
        self.rounds = Rounds(local)
        groups = [[tensor for tensor in group["params"] if tensor.requires_grad] for group in inner.param_groups]
        self.tensors = [tensor.detach() for group in groups for tensor in group]
        anchors = [[tensor.detach().clone() for tensor in group] for group in groups]
        self.anchor = [tensor for group in anchors for tensor in group]
        self.outer = outer_of(local, Extras(), len(groups)).build(anchors)
        self.rounds.begin(time.monotonic())

    @property
    def steps_since_exchange(self) -> int:
        return self.rounds.steps

    def note_step(self) -> None:
        """A local step was taken: ends the round if it was its last."""
        if not self.rounds.end_step(time.monotonic()):
            return
        for anchor, tensor in zip(self.anchor, self.tensors, strict=True):
            anchor.grad = anchor - tensor
        self.outer.step()
        self.outer.zero_grad()
        torch._foreach_copy_(self.tensors, self.anchor)
        self.rounds.begin(time.monotonic())
