"""How much a gradient would change the parameters: |g| / |w|, what PSSP's `significance` asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

SMALLEST = 1e-30
"""Parameters that are all zero make any gradient significant."""


def significance(gradient: Sequence[Tensor], parameters: Tensor) -> float:
    """Of a gradient in pieces, beside the parameters it is for."""
    length = math.sqrt(sum(float(piece.norm()) ** 2 for piece in gradient))
    return length / max(float(parameters.norm()), SMALLEST)
