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
    if not hasattr(_passes, "optimize"):
        _passes = None  # compiled from an older version of the source


PART = 1 << 18
"""So many elements torch steps on at once: a megabyte in float32. Smaller parts fit the caches better, but then the
calls of torch cost more than that saves."""
AT_ONCE = 1 << 20
"""So many elements torch copies and checks together: four megabytes, which a third-level cache holds."""
NOT_COMPILED = (
    "paceline was installed without a C compiler, or by an older version, or this processor has no AVX2, so it is "
    "slower; with a compiler: pip install --force-reinstall --no-cache-dir --no-deps paceline"
)


def are_compiled() -> bool:
    """Whether there was a C compiler when paceline was installed, and the processor has wide vectors."""
    return _passes is not None


def is_plain_float32(vector: Tensor) -> bool:
    """Whether the vector is a contiguous float32 CPU tensor; false for one that is lazily negated or a zero tensor."""
    plain = type(vector) is Tensor and vector.dtype is torch.float32 and vector.is_cpu and vector.is_contiguous()
    return plain and not (vector.is_neg() or vector._is_zerotensor())


def are_plain_float32(vectors: Sequence[Tensor], where: slice) -> bool:
    return all(is_plain_float32(vector) and len(vector) >= where.stop for vector in vectors)


def copy_and_check_finite(source: Tensor, target: Tensor, around: bool = False) -> bool:
    """Copies, and says whether all values are finite; `around` the caches, if the target is not read soon."""
    if _passes is not None and source.shape == target.shape and is_plain_float32(source) and is_plain_float32(target):
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
    """Whether all values are finite: a sum is one pass, and only a sum that is not finite needs a closer look."""
    if values.numel() > AT_ONCE:
        return all(map(is_finite, values.reshape(-1).split(AT_ONCE)))
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def step(
    values: Tensor, gradients: Sequence[Tensor], targets: Sequence[Tensor], rate: float, where: slice, scratch: Tensor
) -> None:
    """Adds `rate` times the sum of the gradients to the values in the range `where`, and writes those to all targets.

    Targets may be among the gradients. If there are several gradients their sum may need memory for a part, `scratch`,
    which may be the first of them.
    """
    if _passes is not None and are_plain_float32((values, *gradients, *targets), where):
        _passes.step(address(values, where), addresses(gradients, where), addresses(targets, where), rate, size(where))
        return
    own = len(gradients) > 1 and scratch is gradients[0]
    for at in range(where.start, where.stop, PART):
        here = slice(at, min(at + PART, where.stop))
        each = [gradient[here] for gradient in gradients]
        new = values[here].add_(sum_into(each, each[0] if own else scratch), alpha=rate)
        for target in targets:
            target[here].copy_(new)


def step_on_each(values: Tensor, gradients: Sequence[Tensor], rates: Sequence[float], where: slice) -> None:
    """Adds `rate` times each gradient to the values in turn, in the range `where`; each is overwritten by the values
    after it."""
    if _passes is not None and are_plain_float32((values, *gradients), where):
        _passes.step_on_each(address(values, where), addresses(gradients, where), tuple(rates), size(where))
        return
    for at in range(where.start, where.stop, PART):
        here = slice(at, min(at + PART, where.stop))
        latest = values[here]
        for gradient, rate in zip(gradients, rates, strict=True):
            latest = torch.add(latest, gradient[here], alpha=rate, out=gradient[here])
        values[here].copy_(latest)


def optimize(
    kind: int,
    values: Tensor,
    states: Sequence[Tensor | None],
    average: Tensor | None,
    gradients: Sequence[Tensor],
    targets: Sequence[Tensor],
    coefficients: Sequence[float],
    each: bool,
) -> None:
    """Takes one step of a compiled kind on the sum of the gradients, or one on `each`, which is then overwritten by
    the values after it. There is no such thing in torch: it must be compiled, and values and states be plain
    float32."""
    odd: list[Tensor] = []
    if not each:  # what came over a network may lie at any address, and what leaves over one may be halves
        gradients = [gradient.clone() if gradient.data_ptr() % 4 else gradient for gradient in gradients]
        odd = [target for target in targets if not is_plain_float32(target)]
        targets = [target for target in targets if is_plain_float32(target)] if odd else targets
    vectors = [values, *gradients, *targets, *(vector for vector in (*states, average) if vector is not None)]
    if not are_plain_float32(vectors, slice(0, len(values))):
        raise ValueError("a compiled optimizer steps contiguous float32 vectors on the CPU, as long as the values")
    _passes.optimize(
        kind,
        values.data_ptr(),
        tuple([0 if state is None else state.data_ptr() for state in states]),
        0 if average is None else average.data_ptr(),
        tuple([gradient.data_ptr() for gradient in gradients]),
        tuple([target.data_ptr() for target in targets]),
        tuple(coefficients),
        each,
        len(values),
    )
    for target in odd:
        target.copy_(values)


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all numbers of all tensors are finite. Each device is asked, and waited for, once."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu:
            if not is_finite(tensor):
                return False
        elif tensor.numel():
            found.setdefault(tensor.device, []).append(tensor)
    largest = (torch.stack(torch._foreach_norm(each, math.inf)) for each in found.values())
    return all(bool(norms.isfinite().all()) for norms in largest)


def sum_into(pieces: Sequence[Tensor], where: Tensor) -> Tensor:
    """Returns the sum of several pieces, made at the beginning of `where`; a single piece is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    total = torch.add(pieces[0], pieces[1], out=where[: len(pieces[0])])
    for piece in pieces[2:]:
        total += piece
    return total


def weighted_sum_into(pieces: Sequence[Tensor], shares: Sequence[float], where: Tensor) -> Tensor:
    """Returns the sum of the pieces, each times its share, made at the beginning of `where`, which may be the first."""
    total = torch.mul(pieces[0], shares[0], out=where[: len(pieces[0])])
    for piece, share in zip(pieces[1:], shares[1:], strict=True):
        total.add_(piece, alpha=share)
    return total


def address(vector: Tensor, where: slice) -> int:
    return vector.data_ptr() + 4 * int(where.start)


def addresses(vectors: Sequence[Tensor], where: slice) -> tuple[int, ...]:
    return tuple([address(vector, where) for vector in vectors])


def size(where: slice) -> int:
    return int(where.stop - where.start)
