"""One shard's slice of the parameters in the memory of a device, stepped there by torch's own optimizers.

A device is so fast that what Python says for each tensor counts, so a step is one of torch's over runs of adjoining
tensors, not one over each piece (`shard_optimizer.py`). From the first time that a tensor has no gradient on, each
tensor is stepped, and counts its steps, by itself. What comes in and out is the same as there: gradients cut as the
slice is, weights, a state in the form of pieces. Calls return when the device has been given the work; whoever tells
others of it waits first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.tensors.layout import Layout, Part, Piece
from paceline.tensors.optimizer_catalogue import CATALOGUE
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.piece_optimizers import (
    SCALARS,
    Hyper,
    MovingAverage,
    State,
    constructor_arguments,
    padded,
    set_group,
    unpadded,
)
from paceline.tensors.shard_optimizer import (
    AVERAGE,
    PIECE,
    SAMPLES,
    THERE,
    ShardOptimizer,
    SlicedGradient,
    runs_of,
)

FUSED = ("adam", "adamw")
"""Kinds that torch steps in one kernel; the others, in one for each operation."""


class DeviceOptimizer:
    """One shard's slice of the parameters, and the optimizer that steps it: as `ShardOptimizer`, on a device."""

    can_step_on_each = False

    def __init__(self, layout: Layout, part: Part, values: Tensor, spec: OptimizerSpec) -> None:
        self.values = values
        self.spec = spec
        self.entries = layout.entries
        self.pieces = layout.pieces(part, max(1, layout.numel))
        self.small = layout.pieces(part, PIECE)
        """The pieces in which a state is written down."""
        self.kind = CATALOGUE[spec.name]
        self.hyper = [dict(group) for group in spec.groups]
        self.step_schedule = spec.extras.step_schedule()
        self.clip_mean = spec.extras.clip_mean
        self.runs = [
            Piece(self.pieces[run.first].entry, self.pieces[run.first].group, run.offset, run.length, run.start)
            for run in runs_of(self.pieces)
        ]
        self.cuts = self.cut(values)
        self.average = values.clone() if spec.extras.ema is not None else None
        self.following: MovingAverage | None = None
        if self.average is not None and spec.extras.ema is not None:
            self.following = MovingAverage(self.average, spec.extras.ema, spec.extras.stretch)
        self.is_fused = spec.name in FUSED
        self.by_run = not self.kind.whole
        """Whether runs are stepped, not tensors."""
        self._make()

    def _make(self) -> None:
        """Makes torch's optimizer over the tensors, or runs, of this slice."""
        self.units = self.runs if self.by_run else self.pieces
        self.tensors = list(self.cuts.runs) if self.by_run else list(self.cuts)
        if self.kind.whole:
            shapes = [self.entries[piece.entry].shape for piece in self.pieces]
            self.tensors = [tensor.view(shape) for tensor, shape in zip(self.tensors, shapes, strict=True)]
        self.groups = sorted({unit.group for unit in self.units})
        """Those of which this slice has something: the groups of `optimizer`, in order."""
        make: Any = self.kind.cls
        way = "fused" if self.is_fused else "foreach"
        chosen = {way: True} if way in inspect.signature(make).parameters else {}
        told = []
        for group in self.groups:
            mine = [tensor for tensor, unit in zip(self.tensors, self.units, strict=True) if unit.group == group]
            told.append({"params": mine, **self.hyper[group], **chosen})
        self.optimizer: torch.optim.Optimizer
        if told:
            self.optimizer = make(told, **constructor_arguments(self.hyper[0]))

    def _split(self) -> None:
        """Steps each tensor by itself from now on."""
        learned = self.state()
        self.by_run = False
        self._make()
        self.load_state(learned)

    def close(self) -> None:
        """There is nothing to end."""

    def cut(self, flat: Tensor) -> SlicedGradient:
        """Cuts a vector as long as the slice into its pieces and runs."""
        return SlicedGradient(
            [flat[piece.offset : piece.offset + piece.length] for piece in self.pieces],
            [flat[run.offset : run.offset + run.length] for run in self.runs],
        )

    def cut_from(self, whole: Tensor) -> SlicedGradient:
        """Cuts the pieces and runs of the slice out of a vector over all parameters."""
        return SlicedGradient(
            [whole[piece.start : piece.start + piece.length] for piece in self.pieces],
            [whole[run.start : run.start + run.length] for run in self.runs],
        )

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Takes over hyper-parameters that a scheduler has changed on the worker."""
        for mine, theirs in zip(self.hyper, groups, strict=True):
            mine.update(theirs)

    @cached_property
    def scratch(self) -> SlicedGradient:
        """Memory for the sum of several gradients, which are only read."""
        return self.cut(torch.empty_like(self.values))

    # Steps.

    def apply(
        self,
        gradients: Sequence[Sequence[Tensor]],
        weight: float,
        absent: Sequence[frozenset[int]] = (),
        targets: Sequence[Sequence[Tensor]] = (),
        spoil: bool = False,
        norm: float | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        """One step on the mean of `gradients` at `weight` times the learning rate, as `ShardOptimizer.apply`."""
        if not self.pieces:
            return
        clip = self.clip_factor(gradients, norm, shares)
        self.step_schedule.advance(len(gradients))
        missing = frozenset[int]().union(*absent).intersection(*absent) if any(absent) else frozenset()
        if missing and self.by_run:
            self._split()
        mean = self._mean(gradients, shares, clip)
        before = self.values.clone() if self.kind.blended and weight != 1 else None
        factors = {
            group: set_group(told, self.hyper[group], self.kind, weight, self.step_schedule)
            for group, told in zip(self.groups, self.optimizer.param_groups, strict=True)
        }
        for tensor, gradient, unit in zip(self.tensors, mean.runs if self.by_run else mean, self.units, strict=True):
            factor = factors[unit.group]
            if unit.entry in missing:
                tensor.grad = None
            else:
                tensor.grad = (gradient if factor == 1 else gradient * factor).view(tensor.shape)
        self.optimizer.step()
        if before is not None:
            self.values.copy_(before.lerp_(self.values, weight))
        if self.following is not None:
            self._follow(self.following, self.following.share(weight), missing)
        for target in targets:
            assert isinstance(target, SlicedGradient)
            torch._foreach_copy_(target.runs, self.cuts.runs)

    def _follow(self, average: MovingAverage, share: float, missing: frozenset[int]) -> None:
        stepped = [index for index, piece in enumerate(self.pieces) if piece.entry not in missing]
        old = self.cut(average.values)
        torch._foreach_lerp_([old[index] for index in stepped], [self.cuts[index] for index in stepped], share)

    def _mean(self, gradients: Sequence[Sequence[Tensor]], shares: Sequence[float], factor: float) -> SlicedGradient:
        """Returns the mean of the gradients times `factor`; one alone that lies in one vector as it is, if that is
        1."""
        if len(gradients) == 1 and factor == 1 and isinstance(gradients[0], SlicedGradient):
            return gradients[0]
        parts, sums = [each.runs for each in gradients if isinstance(each, SlicedGradient)], self.scratch.runs
        if len(parts) < len(gradients):
            parts, sums = [list(each) for each in gradients], list(self.scratch)
        torch._foreach_copy_(sums, parts[0])
        if shares:
            torch._foreach_mul_(sums, shares[0])
        for number, part in enumerate(parts[1:], 1):
            torch._foreach_add_(sums, part, alpha=shares[number] if shares else 1)
        scale = factor if shares else factor / len(gradients)
        if scale != 1:
            torch._foreach_mul_(sums, scale)
        return self.scratch

    def apply_each(
        self, gradients: Sequence[Sequence[Tensor]], weights: Sequence[float], all_wait: bool = False
    ) -> None:
        """Steps on one gradient after the other, each its own target."""
        for gradient, weight in zip(gradients, weights, strict=True):
            self.apply([gradient], weight, targets=[gradient])

    def measure(self, gradients: Sequence[Sequence[Tensor]], shares: Sequence[float] = ()) -> float:
        """Returns the squared norm of the mean of `gradients`, which are only read."""
        if not self.pieces:
            return 0.0
        norms = torch.stack(torch._foreach_norm(self._mean(gradients, shares, 1.0).runs))
        return float(norms.double().square().sum())

    def clip_factor(
        self, gradients: Sequence[Sequence[Tensor]], norm: float | None, shares: Sequence[float] = ()
    ) -> float:
        """Returns what the mean of `gradients` is multiplied by, as in torch.nn.utils.clip_grad_norm_."""
        if self.clip_mean is None:
            return 1.0
        if norm is None:
            norm = math.sqrt(self.measure(gradients, shares))
        return min(1.0, self.clip_mean / (norm + 1e-6))

    # Its state, on the CPU.

    def state(self) -> State:
        """Returns the optimizer's state for this slice: vectors as long as the slice, scalars by (small) piece."""
        states = [self.optimizer.state.get(tensor, {}) for tensor in self.tensors] if self.pieces else []
        owners = self._owners()
        state: State = {THERE: torch.tensor([float(bool(states[owner])) for owner in owners])}
        for name in dict.fromkeys(name for each in states for name, value in each.items() if value is not None):
            if name in SCALARS:
                numbers = [float(each.get(name, 0.0)) for each in states]
                state[name] = torch.tensor([numbers[owner] for owner in owners])
            else:
                vector = torch.zeros_like(self.values)
                for unit, each in zip(self.units, states, strict=True):
                    if each.get(name) is not None:
                        there = vector[unit.offset : unit.offset + unit.length]
                        there.copy_(padded(each[name], unit.length))
                state[name] = vector.cpu()
        if self.average is not None:
            state[AVERAGE] = self.average.cpu()
        if self.step_schedule.schedule is not None:
            state[SAMPLES] = torch.tensor([float(self.step_schedule.samples)], dtype=torch.float64)
        return state

    def load_state(self, state: State) -> None:
        """Takes over what `state` has returned, or that of a `ShardOptimizer`."""
        if self.average is not None and AVERAGE in state:
            self.average.copy_(state[AVERAGE])
        if SAMPLES in state:
            self.step_schedule.samples = int(state[SAMPLES])
        counts = [value for name, value in state.items() if name in (*SCALARS, THERE)]
        owners = self._owners()
        within = [index for index, (one, other) in enumerate(pairwise(owners)) if one == other]
        if self.by_run and any(bool((value[:-1] != value[1:])[within].any()) for value in counts):
            self.by_run = False  # its tensors are not equally far
            self._make()
            owners = self._owners()
        first = {owner: index for index, owner in reversed(list(enumerate(owners)))}
        for owner, (unit, tensor) in enumerate(zip(self.units, self.tensors, strict=True)):
            index, where = first[owner], slice(unit.offset, unit.offset + unit.length)
            if not state[THERE][index]:
                continue
            learned = self.optimizer.state[tensor]
            for name, value in state.items():
                if name in SCALARS:  # torch's fused steps count on the device
                    learned[name] = value[index].clone().to(self.values.device if self.is_fused else "cpu")
                elif name not in (THERE, AVERAGE, SAMPLES):
                    learned[name] = unpadded(name, value[where].clone(), tuple(tensor.shape)).to(self.values.device)

    def _owners(self) -> list[int]:
        """Returns, for each small piece, the number of the tensor or run that it is a part of."""
        owners, owner = [], 0
        for each in self.small:
            while each.offset >= self.units[owner].offset + self.units[owner].length:
                owner += 1
            owners.append(owner)
        return owners


SliceOptimizer = ShardOptimizer | DeviceOptimizer
