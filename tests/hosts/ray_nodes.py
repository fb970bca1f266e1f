"""A Ray cluster of several nodes on this machine, for as long as the standard input is open: ray_nodes.py COUNT CPUS

Prints its address. To `remove` it takes away the node that has a server of the run that is going on, and prints what it
had: the numbers of its bundles in the placement group. To `left` it prints what there is of any run. Lines that are
answers begin with `>`.
"""

from __future__ import annotations

import logging
import sys

import ray
from ray.cluster_utils import Cluster

MEMORY = 80_000_000


def bundles_by_node() -> dict[str, list[int]]:
    """Of the run that is going on."""
    (group,) = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    found: dict[str, list[int]] = {}
    for bundle, node in group["bundles_to_node_id"].items():
        found.setdefault(node, []).append(int(bundle))
    return found


def left() -> list[str]:
    """Groups and actors of runs."""
    groups = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    return groups + [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def main() -> None:
    count, cpus = map(int, sys.argv[1:])
    given = {"num_cpus": cpus, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**given, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**given) for _ in range(count - 1)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        print(">", cluster.address, flush=True)
        for line in sys.stdin:
            if line == "left\n":
                print(">", *left(), flush=True)
                continue
            had = bundles_by_node()
            last = max(bundle for bundles in had.values() for bundle in bundles)
            victim = next(node for node in nodes if {last, last - 1} & set(had.get(node.node_id, [])))
            nodes.remove(victim)
            cluster.remove_node(victim)
            print(">", *had[victim.node_id], flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
