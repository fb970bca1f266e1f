"""How a process of a live run interprets texts of its driver: policies and scenarios.

A driver of the same host is believed. Behind an agent (`multihost/agent.py`) the driver is on another host, and none of
its texts may become a path or code here. The agent marks this with `LiveConfig.guest`, whatever the driver says.
"""

from __future__ import annotations

from paceline import cluster, policies, user_code
from paceline.cluster import Cluster
from paceline.core.policy import Policy
from paceline.runtime.live.protocol.configuration import LiveConfig


def policy_of(text: str, config: LiveConfig, script: Policy | None = None) -> Policy:
    """Returns the policy that the driver names; `script` is the one that this process's script has given, if any."""
    if not config.guest:
        return policies.parse(text)
    own = [script] if script is not None else []
    if config.own_policy is not None:
        own.append(policies.parse(config.own_policy))
    return policies.parse_remote(text, own)


def scenario_of(config: LiveConfig) -> Cluster | None:
    """Returns the scenario that is injected into this run, if any."""
    if config.cluster is None:
        return None
    if not config.guest:
        return cluster.from_table(config.cluster)
    with user_code.text_of_another_host():
        return cluster.from_table(config.cluster)
