"""Take part in a run with workers that are forks: Python and torch start once for a host, not once for a worker.

forks.py KEY-FILE WORKERS WORKLOAD OPTIMIZER BATCH ITERATIONS
"""

import sys
from functools import partial
from pathlib import Path

from paceline import workloads
from paceline.api import check_optimizer
from paceline.commands.hosts import Knocking
from paceline.core.messages import Members
from paceline.runtime.live.across.agent import Agent, Offer, new_token
from paceline.runtime.live.across.far import FarLink, make_keys
from paceline.runtime.live.across.keyring import read_key_file
from paceline.runtime.live.driver.children import StartWorker, function_starter
from paceline.training import train


def starter(name: str, optimizer: str, batch: int, iterations: int) -> StartWorker:
    workload = workloads.load(name)
    spec = check_optimizer(optimizer, workload, batch, Members(1, 1))
    return function_starter(partial(train, workload, spec, batch, iterations, 0))


def take_part(key_path: Path, workers: int, start: StartWorker) -> int:
    key_file, keys, token = read_key_file(key_path), make_keys(), new_token()
    link = FarLink(key_file.address, b"join", key_file.client, key_file.server)
    offer = Offer(key_file.address, key_file.server, keys, token, workers)
    try:
        return Agent(offer, start, knock=Knocking(link, keys.public, token)).run()
    finally:
        link.close()


if __name__ == "__main__":
    key, workers, name, optimizer, batch, iterations = sys.argv[1:]
    sys.exit(take_part(Path(key), int(workers), starter(name, optimizer, int(batch), int(iterations))))
