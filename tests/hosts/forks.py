"""Take part in a run with workers that are forks: Python and torch start once for a host, not once for a worker.

forks.py KEY-FILE|ADDRESS WORKERS WORKLOAD OPTIMIZER BATCH ITERATIONS
"""

import sys
from functools import partial
from pathlib import Path

from paceline import workloads
from paceline.api import check_optimizer
from paceline.commands.serve_join import ConnectionProgress
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.children import WorkerStarter
from paceline.runtime.live.messaging.key_files import read_key_file
from paceline.runtime.live.messaging.remote_links import RemoteLink, make_keys
from paceline.runtime.live.multihost.agent import Agent, AgentOffer, new_token
from paceline.workload_training import train


def starter(name: str, optimizer: str, batch: int, iterations: int) -> WorkerStarter:
    workload = workloads.load(name)
    spec = check_optimizer(optimizer, workload, batch, Members(1, 1))
    return function_starter(partial(train, workload, spec, batch, iterations, 0))


def take_part_openly(address: str, workers: int, start: WorkerStarter) -> int:
    """In a run without keys."""
    return Agent(AgentOffer(address, "", None, new_token(), workers), start, print).run()


def take_part(key_path: Path, workers: int, start: WorkerStarter) -> int:
    key_file, keys, token = read_key_file(key_path), make_keys(), new_token()
    link = RemoteLink(key_file.address, b"join", key_file.client, key_file.server)
    offer = AgentOffer(key_file.address, key_file.server, keys, token, workers)
    try:
        return Agent(offer, start, print, ConnectionProgress(link, keys.public, token)).run()
    finally:
        link.close()


if __name__ == "__main__":
    key, workers, name, optimizer, batch, iterations = sys.argv[1:]
    start = starter(name, optimizer, int(batch), int(iterations))
    if key.startswith("tcp://"):
        sys.exit(take_part_openly(key, int(workers), start))
    sys.exit(take_part(Path(key), int(workers), start))
