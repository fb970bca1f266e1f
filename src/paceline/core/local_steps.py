"""Local steps: a worker trains alone for a round, and only then exchanges what it has learned.

The rule. A worker does some *local steps* with the user's own optimizer, the *inner* one, on its own parameters: a
*round*. At its end it pushes the *outer gradient*, what it began with less what it has come to (`anchor - parameters`),
weighted by the samples it has used. The servers step with an *outer* optimizer, and the answer is what the worker
begins its next round with. So a round is what every policy and every machine calls an iteration: who waits for whom,
staleness and what is dropped are counted in rounds. The inner optimizer's state stays with the worker.

    local SGD, DiLoCo                     bsp with local steps (Douillard et al. 2023: outer Nesterov, 0.7 and 0.9)
    asynchronous local SGD                asp with local steps (Liu et al. 2024)
    bounded, with a quorum, by gossip     ssp, backup, deadline, hop with local steps

How long a round is:

    local_steps=32            so many steps
    every_s=30                until the step that is under way when so many seconds are over
    local_steps=auto          as ZipLine plans: a moment is chosen at which all can be at the end of a step, each having
                              done from `at_least` to `at_most` steps (`core/control/round_planner.py`)
    local_steps=proportional  in proportion to speed, `at_most` the fastest (DyLU, Liu et al. 2024)

The first round of `auto` and `proportional` has `at_least` steps, since no speed is known yet.

A run has one `LocalSteps` beside its policy, and it is no part of that: the machines are the same with it. In texts it
stands among a policy's parameters (`policies/with_local_steps.py` takes it out).

What it gives up. Between exchanges workers drift apart, the more the longer rounds are and the more their data differ;
the outer step is no step along a gradient, and faster workers that do more steps pull the model towards themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from paceline.core import spec
from paceline.errors import ConfigError

Rule = Literal["steps", "time", "auto", "proportional"]
"""How the end of a round is found."""
OUTER = "nesterov(lr=0.7,momentum=0.9)"
"""The outer optimizer if none is named (Douillard et al. 2023)."""
AVERAGE = "average"
"""The outer optimizer that only averages; what peers do always, each adding what it has learned."""
MOST_STEPS = 1_000_000
LONGEST_S = 1e6
LONGEST_OUTER = 500
"""An outer optimizer's text has at most so many characters."""
KEYS = ("local_steps", "every_s", "outer")
"""The keys in texts, and the keywords in Python."""
BOUNDS = {"auto": (16, 64), "proportional": (1, 64)}
"""The bounds of a round that has some, if nothing is said."""


class LocalSteps(Struct, frozen=True):
    """How many steps a worker does alone before it exchanges, and what the servers do with what it has learned."""

    rule: Rule
    steps: int = 0
    """The steps of a round of the rule `steps`."""
    every_s: float = 0.0
    """The seconds of a round of the rule `time`."""
    at_least: int = 1
    at_most: int = MOST_STEPS
    """The bounds of a round, in steps, whatever its rule."""
    outer: str = OUTER
    """The outer optimizer as text; `tensors/outer_optimizers.py` reads it."""

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ConfigError(f"local_steps={self.rule} is unknown: a number of steps, auto or proportional")
        if self.rule == "steps":
            check_whole("local_steps", self.steps)
        if self.rule == "time" and not (is_number(self.every_s) and 0 < self.every_s <= LONGEST_S):
            raise ConfigError(f"every_s={self.every_s} is out of range: seconds above 0, at most {LONGEST_S:g}")
        check_whole("at_least", self.at_least)
        check_whole("at_most", self.at_most)
        if self.at_least > self.at_most:
            raise ConfigError(f"at_least={self.at_least} is more than at_most={self.at_most}: a round has no length")
        if not isinstance(self.outer, str) or len(self.outer) > LONGEST_OUTER:
            raise ConfigError(f"outer is a text like {OUTER!r} of at most {LONGEST_OUTER} characters")
        spec.split(self.outer)

    @property
    def is_planned(self) -> bool:
        """Whether the length of a round depends on the speed of all, so that somebody must plan it."""
        return self.rule in BOUNDS

    @property
    def most_steps(self) -> int:
        """The most steps a round can have."""
        return self.steps if self.rule == "steps" else self.at_most

    def __str__(self) -> str:
        return ",".join(self.arguments())

    def arguments(self) -> list[str]:
        """Returns what stands for it in a text, as KEY=VALUE; what is as if nothing had been said is left out."""
        if self.rule == "steps":
            said = [f"local_steps={self.steps}"]
        elif self.rule == "time":
            said = [f"every_s={spec.write_value(float(self.every_s))}"]
        else:
            usual = zip(("at_least", "at_most"), (self.at_least, self.at_most), BOUNDS[self.rule], strict=True)
            bounds = ",".join(f"{key}={value}" for key, value, otherwise in usual if value != otherwise)
            said = [f"local_steps={self.rule}({bounds})" if bounds else f"local_steps={self.rule}"]
        return said if self.outer == OUTER else [*said, f"outer={self.outer}"]

    def keywords(self) -> dict[str, Any]:
        """Returns what makes it again, as the keywords of `make`."""
        return dict(argument.split("=", 1) for argument in self.arguments())


def make(
    local_steps: int | str | None = None, every_s: float | str | None = None, outer: str | None = None
) -> LocalSteps | None:
    """Makes the record from what was said in keywords, on a command line or in a text; None if nothing was."""
    if local_steps is None and every_s is None:
        if outer is not None:
            raise ConfigError(f"outer={outer} is for local steps: say how many, as local_steps=32, or every_s=30")
        return None
    if local_steps is not None and every_s is not None:
        raise ConfigError(f"local_steps={local_steps} and every_s={every_s}: a round ends by one of them, give one")
    if every_s is not None:
        made = LocalSteps("time", every_s=read_seconds(every_s))
    elif isinstance(local_steps, str):
        made = read_local_steps(local_steps)
    else:
        assert local_steps is not None
        made = LocalSteps("steps", steps=local_steps)
    return made if outer is None else replace(made, outer=outer)


def read_local_steps(text: str) -> LocalSteps:
    """Reads '32', 'auto', or 'auto(at_least=16,at_most=64)'."""
    text = text.strip()
    if text.removeprefix("-").isdecimal():
        return LocalSteps("steps", steps=int(text[:20]))
    name, arguments = spec.split(text) if text else ("", {})
    if name not in BOUNDS:
        raise ConfigError(f"local_steps={text} is unknown: a number of steps, {' or '.join(BOUNDS)}")
    least, most = BOUNDS[name]
    bounds = read_bounds(name, arguments)
    least, most = bounds.get("at_least", least), bounds.get("at_most", most)
    return LocalSteps("auto" if name == "auto" else "proportional", at_least=least, at_most=most)


def read_bounds(name: str, arguments: Mapping[str, str]) -> dict[str, int]:
    bounds = {}
    for key, value in arguments.items():
        if key not in ("at_least", "at_most"):
            raise ConfigError(f"local_steps={name} has no parameter {key!r} (it has: at_least, at_most)")
        if not value.isdecimal():
            raise ConfigError(f"local_steps={name}: {key}={value} is not a whole number")
        bounds[key] = int(value[:20])
    return bounds


def read_seconds(given: float | str) -> float:
    if not isinstance(given, str):
        return given
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"every_s={given} is not a number of seconds") from None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_STEPS:
        raise ConfigError(f"{name}={value} is out of range: a whole number from 1 to {MOST_STEPS}")
