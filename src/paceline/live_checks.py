"""What a live run is asked to be, checked before anything starts."""

from __future__ import annotations

from typing import NamedTuple

from paceline.api import check_cluster, check_members
from paceline.cluster import Cluster
from paceline.core.local_steps import LocalSteps, make
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy, Policy
from paceline.peer_checks import check_live_scenario, refuse_servers
from paceline.policies import with_local_steps
from paceline.tensors.outer_optimizers import parse_outer


class LiveSize(NamedTuple):
    """The members of a live run, its policy and its scenario, checked."""

    members: Members
    policy: Policy | None
    cluster: Cluster | None
    local_steps: LocalSteps | None = None


def check_live(
    workers: int,
    servers: int | None,
    policy: str | Policy | None,
    cluster: str | Cluster | None,
    slicing: str,
    seed: int,
    local_steps: int | str | None = None,
    every_s: float | None = None,
    outer: str | None = None,
) -> LiveSize:
    """Refuses what cannot run live. Without a policy it is the script's, and servers are assumed until the script
    says."""
    local = make(local_steps, every_s, outer)
    checked = None
    if policy is not None:
        checked, local = with_local_steps.parse(policy, local_steps, every_s, outer)
    if local is not None:
        parse_outer(local.outer)
    members = check_members(workers, 1 if servers is None else servers, seed)
    if isinstance(checked, PeerPolicy):
        refuse_servers(checked, servers, slicing)
        members = Members(workers, 0)
    if isinstance(checked, PeerPolicy):
        checked.placed((workers,)).validate(members)  # on which hosts they will be nobody knows yet
    elif checked is not None:
        checked.validate(members)
    scenario = check_cluster(cluster, members) if cluster is not None else None
    if isinstance(checked, PeerPolicy):
        check_live_scenario(checked, scenario, members)
    return LiveSize(members, checked, scenario, local)
