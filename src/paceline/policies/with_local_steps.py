"""A policy and the local steps beside it, from one text: `bsp:local_steps=32,outer=nesterov(lr=0.7,momentum=0.9)`.

The two are apart everywhere else: a policy says who waits for whom, and its machines do not know what a worker does
between its parameters and its push. Of several policies (a mix, a switch) none has local steps of its own: they are
the run's, and are given beside the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from paceline import policies
from paceline.core import local_steps as records
from paceline.core.local_steps import KEYS, LocalSteps
from paceline.core.policy import CentralPolicy, PeerPolicy, Policy
from paceline.core.spec import split_commas
from paceline.errors import ConfigError
from paceline.policies import user_policy
from paceline.policies.composite import Mix, Switch


class Chosen(NamedTuple):
    """Who waits for whom, and how long workers train alone; None if they exchange at every step."""

    policy: Policy
    local: LocalSteps | None

    def __str__(self) -> str:
        return text_of(str(self.policy), self.local)


def parse(
    policy: str | Policy,
    local_steps: int | str | None = None,
    every_s: float | None = None,
    outer: str | None = None,
) -> Chosen:
    """Reads a policy, and the local steps that its text or the keywords say; refuses what cannot be together."""
    beside = records.make(local_steps, every_s, outer) if local_steps is not None or every_s is not None else None
    text, within = split(policy) if isinstance(policy, str) else (policy, None)
    if beside is not None and within is not None:
        raise ConfigError(f"{policy} has local steps in it, and {beside} is given beside it: say it once")
    if outer is not None and beside is None:
        if within is None:
            records.make(outer=outer)
        elif within.outer != records.OUTER:
            raise ConfigError(f"{policy} names the outer optimizer, and outer={outer} is given beside it: say it once")
        else:
            within = replace(within, outer=outer)
    chosen = Chosen(policies.parse(text), beside or within)
    if chosen.local is None:
        return chosen
    check_local_steps(chosen.policy, chosen.local)
    if isinstance(chosen.policy, PeerPolicy):
        return Chosen(chosen.policy, replace(chosen.local, outer=records.AVERAGE))
    return chosen


def split(text: str) -> tuple[str, LocalSteps | None]:
    """Takes the local steps out of a policy's text."""
    masked, files = user_policy.mask_files(text)
    if not any(f"{key}=" in masked.replace(" ", "") for key in KEYS):
        return text, None
    if policies.PHASE.search(masked) or len(policies.BETWEEN_SHARDS.split(outside_brackets(masked))) > 1:
        raise ConfigError(f"{text}: of several policies none has local steps of its own, give local_steps beside them")
    stripped = masked.strip()
    head, between, rest = stripped.partition(":")
    if "(" in head and stripped.endswith(")"):
        head, _, rest = stripped[:-1].partition("(")
        between = ":"
    mine: dict[str, str] = {}
    others = []
    # A file of the user's is masked with its class, so its parameters too begin behind the first colon.
    for part in split_commas(rest):
        key, _, value = part.partition("=")
        if key.strip() not in KEYS:
            others.append(part)
        elif key.strip() in mine:
            raise ConfigError(f"{key.strip()!r} is given twice in {text!r}")
        else:
            mine[key.strip()] = value.strip()
    if not mine:
        return text, None
    plain = f"{head}{between}{','.join(others)}" if others else head
    return user_policy.unmask_files(plain, files), records.make(**mine)


def outside_brackets(text: str) -> str:
    """Returns the text with what stands in brackets left out."""
    depth, kept = 0, []
    for letter in text:
        depth -= letter == ")"
        if depth <= 0:
            kept.append(letter)
        depth += letter == "("
    return "".join(kept)


def text_of(policy: str, local: LocalSteps | None) -> str:
    """Returns the text of a policy with its local steps; of several policies, with those behind a blank."""
    if local is None:
        return policy
    masked, _ = user_policy.mask_files(policy)
    if policies.PHASE.search(masked) or len(policies.BETWEEN_SHARDS.split(masked)) > 1:
        return f"{policy} {local}"
    return f"{policy}{',' if ':' in masked else ':'}{local}"


def check_local_steps(policy: Policy, local: LocalSteps) -> None:
    """Refuses, in one line, local steps under a policy that cannot have them; both runtimes ask."""
    for part in parts_of(policy):
        if part.refuses_local_steps:
            raise ConfigError(f"{part} cannot have {local}: {part.refuses_local_steps}")
    if isinstance(policy, PeerPolicy) and local.outer not in (records.OUTER, records.AVERAGE):
        raise ConfigError(f"outer={local.outer}: under {policy} nobody steps with it, each adds what it has learned")


def parts_of(policy: Policy) -> Sequence[Policy]:
    """Returns a policy, and those that it is made of."""
    if isinstance(policy, Mix | Switch):
        return policy.constituents()
    return (policy, *policy.constituents()) if isinstance(policy, CentralPolicy) else (policy,)
