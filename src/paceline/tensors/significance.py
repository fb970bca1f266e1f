"""How much a gradient would change the parameters: |g| / |w|, what PSSP's `significance` asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

SMALLEST = 1e-30
"""The norm of the parameters is at least this: if all are zero, any gradient is significant."""


def significance(gradient: Sequence[Tensor], parameters: Tensor) -> float:
    """Returns the significance of a gradient, in pieces, beside the parameters it is for."""
    length = math.sqrt(sum(float(piece.norm()) ** 2 for piece in gradient))
    return length / max(float(parameters.norm()), SMALLEST)
