"""What `paceline.log` takes: a name for each metric, and one number for it.

Names come from a user's script, and to the driver of a live run from another process: they end up in tables, on the
page of a report and in targets (`val_loss<=2`), so what they may be is checked on both sides.
"""

from __future__ import annotations

import numbers
import re
from typing import Any

from paceline.errors import PacelineError

NAME = re.compile(r"[^\W\d][\w./:@-]{0,63}")
ALLOWED = "a letter or _, then letters, digits and _ . / : @ -, 64 characters at most"
RESERVED = ("time_s", "updates")
"""What every point of a history has besides the metrics."""


def is_name(name: object) -> bool:
    """Whether a metric may be called so."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None and name not in RESERVED


def checked(values: dict[str, Any]) -> dict[str, float]:
    """The values given to `paceline.log`, as numbers."""
    return {_checked_name(name): _number(name, value) for name, value in values.items()}


def _checked_name(name: str) -> str:
    if name in RESERVED:
        raise PacelineError(f"paceline.log({name}=...): every point of the history has a {name} of its own")
    if not is_name(name):
        raise PacelineError(f"paceline.log cannot call a metric {name[:80]!r}: a name is {ALLOWED}")
    return name


def _number(name: str, value: Any) -> float:
    """One real number, or a tensor or an array without dimensions that holds one."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, numbers.Real):
        if len(shape):
            raise PacelineError(
                f"paceline.log({name}=...) takes one number, got {type(value).__name__} of shape {tuple(shape)}"
            )
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise PacelineError(f"paceline.log({name}=...) takes a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise PacelineError(f"paceline.log({name}=...) takes a number that fits into 64 bits") from None
