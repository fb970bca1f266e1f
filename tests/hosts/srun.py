"""A stand-in for Slurm's srun on one machine: srun.py --nodes=N --ntasks-per-node=M COMMAND...

It starts the tasks with the variables Slurm sets, on "nodes" that are all this machine, and ends as srun does: with the
highest exit code, and with all tasks when it is ended itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> int:
    options: dict[str, int] = {}
    rest = sys.argv[1:]
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        options[name] = int(value)
    nodes, per_node = options["--nodes"], options["--ntasks-per-node"]
    tasks = []
    for number in range(nodes * per_node):
        said = {
            "SLURM_PROCID": number,
            "SLURM_NTASKS": nodes * per_node,
            "SLURM_LOCALID": number % per_node,
            "SLURM_NODEID": number // per_node,
            "SLURM_NNODES": nodes,
            "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else per_node,
            "SLURM_STEP_NODELIST": "localhost" if nodes == 1 else f"localhost,node[2-{nodes}]",
            "SLURM_JOB_ID": os.environ["SLURM_JOB_ID"],
            "SLURM_STEP_ID": 0,
        }
        environment = {**os.environ, **{name: str(value) for name, value in said.items()}}
        tasks.append(subprocess.Popen(rest, env=environment))

    def pass_on(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return max([abs(task.wait()) for task in tasks])


if __name__ == "__main__":
    sys.exit(main())
