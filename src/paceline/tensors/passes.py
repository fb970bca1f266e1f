"""Passes over memory: an exchange costs as much as the times it goes over the parameters.

torch goes over them once for each operation: to copy a gradient and to look for NaN and Inf in it are two passes, to
take a step and to write the new values to a worker two more. Compiled (`_passes.c`), each is one. What could not be
compiled when paceline was installed, or does not lie in the processor's memory as 32-bit floats one after the other,
torch does, part by part, so that the second pass finds the part in a cache. The numbers are the same to the last bit
(but which NaN a NaN is).
"""

from __future__ import annotations

import math
import platform
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
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        _passes = None  # without wide vectors torch rounds twice where C rounds once


PART = 1 << 18
"""Elements that torch steps on at once: a megabyte in float32. Smaller parts fit the caches better, but then calling
torch costs more than that saves."""
AT_ONCE = 1 << 20
"""And that it copies and looks at together: four megabytes, which a third-level cache holds."""
NOT_COMPILED = (
    "paceline was installed without a C compiler, or this processor has no AVX2, so it is slower; "
    "with a compiler: pip install --force-reinstall --no-cache-dir --no-deps paceline"
)


def are_compiled() -> bool:
    """Whether there was a C compiler when paceline was installed, and the processor has wide vectors."""
    return _passes is not None


def fits(vector: Tensor) -> bool:
    """Whether its bytes are, one after the other, its numbers: others have gaps, are one number that stands for all,
    have their sign still to be changed, or are no more than zeros that are nowhere."""
    plain = type(vector) is Tensor and vector.dtype is torch.float32 and vector.is_cpu and vector.is_contiguous()
    return plain and not (vector.is_neg() or vector._is_zerotensor())


def all_fit(vectors: Sequence[Tensor], where: slice) -> bool:
    return all(fits(vector) and len(vector) >= where.stop for vector in vectors)


def copy_and_look(source: Tensor, target: Tensor, around: bool = False) -> bool:
    """Copy, and say whether all that was copied is finite; `around` the caches, if the target is not read soon."""
    if _passes is not None and source.shape == target.shape and fits(source) and fits(target):
        return _passes.copy_and_look(target.data_ptr(), source.data_ptr(), target.numel(), around)
    if target.numel() <= AT_ONCE:
        target.copy_(source)
        return is_finite(target)
    finite = True
    for part, values in zip(target.view(-1).split(AT_ONCE), source.reshape(-1).split(AT_ONCE), strict=True):
        part.copy_(values)
        finite &= is_finite(part)
    return finite


def is_finite(values: Tensor) -> bool:
    """Whether all values are: a sum is one pass, and only a sum that is not finite needs a second look."""
    if values.numel() > AT_ONCE:
        return all(map(is_finite, values.reshape(-1).split(AT_ONCE)))
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def step(
    values: Tensor, gradients: Sequence[Tensor], targets: Sequence[Tensor], rate: float, where: slice, scratch: Tensor
) -> None:
    """There, add `rate` times the sum of the gradients to the values, and write those to all targets.

    Targets may be among the gradients. If there are several gradients their sum may need memory for a part, `scratch`,
    which may be the first of them.
    """
    if _passes is not None and all_fit((values, *gradients, *targets), where):
        _passes.step(address(values, where), addresses(gradients, where), addresses(targets, where), rate, size(where))
        return
    own = len(gradients) > 1 and scratch is gradients[0]
    for at in range(where.start, where.stop, PART):
        here = slice(at, min(at + PART, where.stop))
        each = [gradient[here] for gradient in gradients]
        new = values[here].add_(add_up(each, each[0] if own else scratch), alpha=rate)
        for target in targets:
            target[here].copy_(new)


def step_on_each(values: Tensor, gradients: Sequence[Tensor], rates: Sequence[float], where: slice) -> None:
    """There, add `rate` times a gradient to the values, one after another; each is written over by the values after
    it."""
    if _passes is not None and all_fit((values, *gradients), where):
        _passes.step_on_each(address(values, where), addresses(gradients, where), tuple(rates), size(where))
        return
    for at in range(where.start, where.stop, PART):
        here = slice(at, min(at + PART, where.stop))
        latest = values[here]
        for gradient, rate in zip(gradients, rates, strict=True):
            latest = torch.add(latest, gradient[here], alpha=rate, out=gradient[here])
        values[here].copy_(latest)


def add_up(pieces: Sequence[Tensor], where: Tensor) -> Tensor:
    """The sum of several, at the beginning of `where`; of one, itself."""
    if len(pieces) == 1:
        return pieces[0]
    total = torch.add(pieces[0], pieces[1], out=where[: len(pieces[0])])
    for piece in pieces[2:]:
        total += piece
    return total


def address(vector: Tensor, where: slice) -> int:
    return vector.data_ptr() + 4 * int(where.start)


def addresses(vectors: Sequence[Tensor], where: slice) -> tuple[int, ...]:
    return tuple([address(vector, where) for vector in vectors])


def size(where: slice) -> int:
    return int(where.stop - where.start)
