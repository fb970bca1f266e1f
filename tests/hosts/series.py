"""Several runs one after the other on the same hosts, each host's Python started once: workers are forks.

    series.py drive FOLDER ADDRESS WORKERS SERVERS POLICY...     on the first host
    series.py take-part FOLDER WORKERS POLICY...                 on every host

SERVERS is 0 for policies without. For each policy the driver leaves a key file in FOLDER, and, at its end, the run's
folder.
"""

import sys
import time
from pathlib import Path

from paceline import run_folder
from paceline.function_workers import function_starter
from paceline.live_checks import check_live
from paceline.run import Target
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.driver.remote_hosts import Meeting
from paceline.runtime.live.driver.run_plan import OpenRun
from paceline.runtime.live.messaging.key_files import KeyFile, write_key_file
from paceline.runtime.live.messaging.remote_links import make_keys
from paceline.runtime.live.protocol.configuration import MultihostOptions
from tests.hosts import forks

TARGET = "accuracy=0.95"
ITERATIONS = 3000
LIMIT_S = 100.0


def drive(folder: Path, address: str, workers: int, servers: int, policies: list[str]) -> None:
    for number, policy in enumerate(policies):
        keys, join = make_keys(), make_keys()

        def opened(run: OpenRun, number: int = number, server: str = keys.public, join=join) -> None:  # type: ignore[no-untyped-def]
            write_key_file(folder / f"{number}.part", KeyFile(run.hosts.address, server, join))
            (folder / f"{number}.part").rename(folder / f"{number}.key")

        size = check_live(workers, servers or None, policy, None, "eps", 0)
        plan = RunPlan(
            size.members, function_starter(lambda: None), size.policy, target=Target.parse(TARGET),
            care=FaultPolicy(timeout_s=LIMIT_S), meeting=Meeting(address, 0, address, keys, join.public),
            multihost=MultihostOptions(address, address), opened=opened,
        )  # fmt: skip
        run = Driver(plan).run()
        run.config = {"policy": policy}
        (folder / str(number)).mkdir()
        run_folder.write_config(folder / str(number), run.config)
        run_folder.save(folder / str(number), run)


def take_part(folder: Path, workers: int, policies: list[str]) -> None:
    start = forks.starter("digits-mlp", "sgd:lr=0.1", 32, ITERATIONS)
    for number in range(len(policies)):
        path = folder / f"{number}.key"
        while not path.exists():
            time.sleep(0.05)
        forks.take_part(path, workers, start)


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        take_part(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
