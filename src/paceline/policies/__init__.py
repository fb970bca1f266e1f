"""The synchronization policies, one algorithm per file. `parse("ssp:staleness=3")` makes one from text.

ssp:staleness=3                   a policy and its parameters
./mine.py:MyPolicy:bound=2        one of your own (user_policy.py)
ssp:staleness=3+backup:extra=1    another on each shard (composite.py)
bsp@0,ssp:staleness=3@100         another from iteration 100 on (composite.py)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline import user_code
from paceline.core import spec
from paceline.core.policy import CentralPolicy, Policy
from paceline.core.spec import option, parameter
from paceline.errors import ConfigError
from paceline.policies import user_policy
from paceline.policies.adpsgd import ADPSGD
from paceline.policies.asp import ASP
from paceline.policies.backup import Backup
from paceline.policies.bsp import BSP
from paceline.policies.composite import Mix, Switch
from paceline.policies.deadline import Deadline
from paceline.policies.dssp import DSSP
from paceline.policies.elastic import ElasticBSP
from paceline.policies.hop import Hop
from paceline.policies.pssp import PSSP
from paceline.policies.scheduled import Scheduled
from paceline.policies.specsync import SpecSync
from paceline.policies.ssp import SSP
from paceline.policies.waiting import Waiting

CATALOGUE: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (BSP, ASP, SSP, DSSP, PSSP, Backup, Deadline, ElasticBSP, SpecSync, Waiting, Scheduled, Hop, ADPSGD)
}
REGISTERED: dict[str, type[Policy]] = {}
"""Classes of policy objects that scripts have passed: this process, and its forks, know them by their names too."""

LONGEST_REMOTE = 1000
"""A policy's text from another host has at most so many characters."""
PHASE = re.compile(r"(.+?)@\s*(\d+)\s*(?:,|$)", re.DOTALL)
FOLDERS = re.compile(r"[^=,+()@]*/(?=[^/]*?\.py\s*:)")
BETWEEN_SHARDS = re.compile(r"\+(?=\s*[A-Za-z_./~])")


def parse(policy: str | Policy) -> Policy:
    """Reads a policy from its text form; a policy object is returned as it is."""
    if isinstance(policy, Policy):
        register(policy)
        return policy
    if not isinstance(policy, str):
        raise ConfigError(f"a policy is a text like 'ssp:staleness=3' or a Policy, got {policy!r}")
    text, files = user_policy.mask_files(policy)
    if PHASE.search(text):
        return parse_switch(text, files)
    return parse_mix(text, files)


def parse_remote(text: str, own: Sequence[Policy] = ()) -> Policy:
    """Reads a policy from a text of another host: one of the catalogue, or one that was given on this host.

    No file is opened. `own` are the policies of this host's own command line and script; one that is in a file is meant
    if class and parameters are the same and the file has the same name, in whatever folder each host has it.
    """
    for given in own:
        if without_folders(str(given)) == without_folders(text):
            return given
    if len(text) > LONGEST_REMOTE:
        raise ConfigError(f"another host names a policy of {len(text)} characters: {LONGEST_REMOTE} at most")
    try:
        with user_code.text_of_another_host():
            return parse(text)
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"another host names the policy {text!r}, which cannot be read: {error}") from None


def without_folders(text: str) -> str:
    """Removes the folders of files from a policy's text, since they differ from host to host."""
    return FOLDERS.sub("", text)


def parse_switch(text: str, files: list[str]) -> Switch:
    phases, end = [], 0
    for phase in PHASE.finditer(text):
        if phase.start() != end:
            break
        phases.append((central(parse_mix(phase[1], files)), int(phase[2])))
        end = phase.end()
    if end != len(text) or text.rstrip().endswith(","):
        written = user_policy.unmask_files(text, files)
        raise ConfigError(f"{written!r}: each policy needs its iteration, as bsp@0,ssp:staleness=3@100")
    return Switch(tuple(phases))


def parse_mix(text: str, files: list[str]) -> Policy:
    texts = [user_policy.unmask_files(part, files) for part in BETWEEN_SHARDS.split(text)]
    if len(texts) == 1:
        return parse_one(texts[0])
    return Mix(tuple(central(parse_one(part)) for part in texts))


def parse_one(text: str) -> Policy:
    if user_policy.is_own(text):
        return user_policy.parse(text)
    name, arguments = spec.split(text)
    if name in REGISTERED and not user_code.is_remote():
        return spec.build(REGISTERED[name], arguments)
    return spec.parse(text, CATALOGUE, "policy")


def central(policy: Policy) -> CentralPolicy:
    if not isinstance(policy, CentralPolicy):
        raise ConfigError(f"{policy} cannot be one of several policies: it has no parameter servers")
    return policy


def register(policy: Policy) -> None:
    """Makes the text form of a policy object readable in this process and its forks."""
    cls = type(policy)
    if isinstance(policy, Mix | Switch):
        for part in policy.policies if isinstance(policy, Mix) else [phase for phase, _ in policy.phases]:
            register(part)
    elif not cls.origin and CATALOGUE.get(cls.name) is not cls:
        if cls.name in CATALOGUE:
            raise ConfigError(
                f"{cls.__name__} has the name {cls.name!r} of one of paceline's policies: give it its own"
            )
        REGISTERED[cls.name] = cls


__all__ = [
    "ADPSGD",
    "ASP",
    "BSP",
    "CATALOGUE",
    "DSSP",
    "PSSP",
    "SSP",
    "Backup",
    "CentralPolicy",
    "Deadline",
    "ElasticBSP",
    "Hop",
    "Mix",
    "Policy",
    "Scheduled",
    "SpecSync",
    "Switch",
    "Waiting",
    "option",
    "parameter",
    "parse",
    "parse_remote",
]
