"""Several runs one after the other on the same hosts, each host's Python started once: workers are forks.

    series.py drive FOLDER ADDRESS WORKERS SERVERS POLICY...     on the first host
    series.py take-part FOLDER WORKERS POLICY...                 on every host

For each policy the driver leaves a key file in FOLDER, and, at its end, the run's folder.
"""

import sys
import time
from functools import partial
from pathlib import Path

from paceline import rundir, workloads
from paceline.api import check_live, check_optimizer
from paceline.commands.hosts import Knocking
from paceline.core.messages import Members
from paceline.run import Target
from paceline.runtime.live.agent import Agent, Offer, new_token
from paceline.runtime.live.children import function_starter
from paceline.runtime.live.far import FarLink, make_keys
from paceline.runtime.live.hosts import Hosts, Meeting
from paceline.runtime.live.keyring import KeyFile, read_key_file, write_key_file
from paceline.runtime.live.launch import Driver, LivePlan
from paceline.runtime.live.watching import Care
from paceline.runtime.live.wire import Abroad
from paceline.training import train

TARGET = "accuracy=0.95"
ITERATIONS = 3000
LIMIT_S = 100.0


def drive(folder: Path, address: str, workers: int, servers: int, policies: list[str]) -> None:
    for number, policy in enumerate(policies):
        keys, join = make_keys(), make_keys()

        def opened(hosts: Hosts, number: int = number, server: str = keys.public, join=join) -> None:  # type: ignore[no-untyped-def]
            write_key_file(folder / f"{number}.part", KeyFile(hosts.address, server, join))
            (folder / f"{number}.part").rename(folder / f"{number}.key")

        size = check_live(workers, servers, policy, None, "eps", 0)
        plan = LivePlan(
            size.members, function_starter(lambda: None), size.policy, target=Target.parse(TARGET),
            care=Care(timeout_s=LIMIT_S), meeting=Meeting(address, 0, address, keys, join.public),
            abroad=Abroad(address, address), opened=opened,
        )  # fmt: skip
        run = Driver(plan).run()
        run.config = {"policy": policy}
        (folder / str(number)).mkdir()
        rundir.write_config(folder / str(number), run.config)
        rundir.save(folder / str(number), run)


def take_part(folder: Path, workers: int, policies: list[str]) -> None:
    workload = workloads.load("digits-mlp")
    spec = check_optimizer("sgd:lr=0.1", workload, 32, Members(1, 1))
    starter = function_starter(partial(train, workload, spec, 32, ITERATIONS, 0))
    for number in range(len(policies)):
        path = folder / f"{number}.key"
        while not path.exists():
            time.sleep(0.05)
        key_file, keys, token = read_key_file(path), make_keys(), new_token()
        link = FarLink(key_file.address, b"join", key_file.client, key_file.server)
        offer = Offer(key_file.address, key_file.server, keys, token, workers)
        try:
            Agent(offer, starter, knock=Knocking(link, keys.public, token)).run()
        finally:
            link.close()


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        take_part(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
