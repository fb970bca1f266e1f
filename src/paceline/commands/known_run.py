"""What the commands that predict start from: a live run's folder, or a scenario with its members."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import cluster as clusters
from paceline import policies, run_folder
from paceline.advice.calibration import Calibration, calibrate
from paceline.advice.changes import Changes, Situation
from paceline.api import check_members
from paceline.core.policy import PeerPolicy
from paceline.errors import ConfigError, Damaged
from paceline.runtime.virtual.backend import SLICE_BYTES

FEW = 4
"""The workers of a scenario that does not say how many it has."""


class Known:
    """A situation that is known, with the changes somebody asks about."""

    def __init__(self, name: str, changes: Changes) -> None:
        self.name = name
        self.changes = changes
        self.config: Mapping[str, Any] = {}
        self.policy = ""
        """The policy of the run, if it is one."""
        self.uncertainty = 0.0
        if Path(name).is_dir():
            found = of_run(name)
            self.config = run_folder.read_config(Path(name))
            self.policy = found.measured.policy
            self.uncertainty = found.measured.uncertainty
            self.before = Situation(found.cluster, found.members, found.measured.slice_bytes)
        else:
            if not name.endswith(".toml") and "/" in name:
                raise ConfigError(f"{name!r} is no folder of a run, and no scenario")
            cluster = clusters.load(name)
            count = len(cluster.measured) or changes.workers or FEW
            cluster.validate(count)
            self.before = Situation(cluster, check_members(count, 1, 0), (SLICE_BYTES,))
        self.after = changes.apply(self.before)

    def command(self, policy: str) -> str:
        """Returns the line to run this policy."""
        members = self.after.members
        size = ["--workers", str(members.workers), "--servers", str(max(1, members.servers))]
        if isinstance(policies.parse(policy), PeerPolicy):
            size = size[:2]
        script, cluster = self.config.get("script"), self.config.get("cluster")
        if isinstance(cluster, str):
            size += ["--cluster", cluster]
        if isinstance(script, str):
            given = [str(each) for each in self.config.get("arguments") or ()]
            return shlex.join(["paceline", "run", *size, "--policy", policy, script, *given])
        compared = ["bsp"] if policy == "bsp" else ["bsp", policy]
        size += [] if isinstance(cluster, str) else ["--cluster", self.name]
        return shlex.join(["paceline", "compare", *compared, *size])


def of_run(name: str) -> Calibration:
    """Calibrates from a run's folder; what cannot be read is the user's mistake."""
    try:
        run = run_folder.load(Path(name))
    except Damaged as error:
        raise ConfigError(f"{error}: it may be damaged, or of another version of paceline") from None
    return calibrate(run, name)
