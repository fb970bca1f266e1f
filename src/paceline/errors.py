"""The few kinds of error a user meets. Each message says what happened, with the values, and what to do."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of paceline's own errors."""


class ConfigError(PacelineError):
    """Something the user wrote cannot be: one line with the value and what is allowed. Exit code 2."""


class RunFailed(PacelineError):
    """A live run could not go on: one line with who failed and why. Exit code 1."""
