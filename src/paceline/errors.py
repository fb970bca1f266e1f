"""The few kinds of error a user meets. Each message says what happened, with the values, and what to do."""

from __future__ import annotations

LONGEST_SHOWN = 10_000


def printable(text: str) -> str:
    """Makes a text of another host safe to show in a terminal: nothing in it is a command to the terminal."""
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text[:LONGEST_SHOWN]
    )
    return shown if len(text) <= LONGEST_SHOWN else f"{shown} ..."


class PacelineError(Exception):
    """The base of paceline's own errors."""


class ConfigError(PacelineError):
    """The user asked for something that cannot be: one line with the value and what is allowed. The exit code is 2."""


class RunFailed(PacelineError):
    """A live run could not go on: one line with who failed and why. The exit code is 1."""


class Damaged(ConfigError):
    """A file is not what was written, or is missing: one line with the file and how to go on. The exit code is 2."""
