"""Passes over memory: an exchange costs as much as the times it goes over the parameters.

torch goes over them once for each operation: to copy a gradient and to look for NaN and Inf in it are two passes, to
take a step and to write the new values to a worker two more. Compiled (`_passes.c`), each is one. What could not be
compiled when paceline was installed, or does not lie in the processor's memory as 32-bit floats one after the other,
torch does, with the same result to the last bit; for its sake whoever calls goes through memory part by part, so that
the second pass finds the part in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.tensors import _passes
else:
    try:
        from paceline.tensors import _passes
    except ImportError:
        _passes = None


def are_compiled() -> bool:
    """Whether there was a C compiler when paceline was installed."""
    return _passes is not None


def fits(vector: Tensor) -> bool:
    """Whether its bytes are, one after the other, its numbers: others have gaps, are one number that stands for all, or
    have their sign still to be changed."""
    return vector.dtype is torch.float32 and vector.is_cpu and vector.is_contiguous() and not vector.is_neg()


def copy_and_look(source: Tensor, target: Tensor, around: bool = False) -> bool:
    """Copy, and say whether all that was copied is finite; `around` the caches, if the target is not read soon."""
    if _passes is not None and fits(source) and fits(target):
        return _passes.copy_and_look(target.data_ptr(), source.data_ptr(), target.numel(), around)
    target.copy_(source)
    return is_finite(target)


def is_finite(values: Tensor) -> bool:
    """Whether all values are: a sum is one pass, and only a sum that is not finite needs a second look."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def step(values: Tensor, gradients: Sequence[Tensor], targets: Sequence[Tensor], rate: float, scratch: Tensor) -> None:
    """Add `rate` times the sum of the gradients to the values, and write those to all targets.

    Targets may be among the gradients. If there are several gradients their sum may be written to `scratch`, which may
    be the first of them.
    """
    if _passes is not None and all(map(fits, (values, *gradients, *targets))):
        where = tuple([gradient.data_ptr() for gradient in gradients]), tuple([target.data_ptr() for target in targets])
        _passes.step(values.data_ptr(), *where, rate, values.numel())
        return
    values.add_(add_up(gradients, scratch), alpha=rate)
    for target in targets:
        target.copy_(values)


def step_on_each(values: Tensor, gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
    """Add `rate` times a gradient to the values, one after another; each is written over by the values after it."""
    if _passes is not None and all(map(fits, (values, *gradients))):
        where = tuple([gradient.data_ptr() for gradient in gradients])
        _passes.step_on_each(values.data_ptr(), where, tuple(rates), values.numel())
        return
    latest = values
    for gradient, rate in zip(gradients, rates, strict=True):
        latest = torch.add(latest, gradient, alpha=rate, out=gradient)
    values.copy_(latest)


def add_up(pieces: Sequence[Tensor], where: Tensor) -> Tensor:
    """The sum of several, at the beginning of `where`; of one, itself."""
    if len(pieces) == 1:
        return pieces[0]
    total = torch.add(pieces[0], pieces[1], out=where[: len(pieces[0])])
    for piece in pieces[2:]:
        total += piece
    return total
