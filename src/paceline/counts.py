"""Whole numbers that somebody has given: checked, with a line that says what is allowed."""

from __future__ import annotations

from paceline.errors import ConfigError


def check_count(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a whole number ({least} or more)")
    if value < least:
        raise ConfigError(f"{name}={value} is out of range: {least} or more")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value} is out of range: {least} to {most}")
    return value
