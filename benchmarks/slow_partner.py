"""AD-PSGD with one slow peer: steps per second of the fast peers and of the slow one, live and as virtual time has it.

    python benchmarks/slow_partner.py

Four peers train digits; a computation takes 0.2 s, the slow peer's 0.8 s (in sleep, so that cores are not what is
measured). A peer that answered only between its computations would hold back whoever has chosen it.
"""

from __future__ import annotations

import argparse

from paceline.api import Job, simulate_job, train_job_live
from paceline.report.peers import apartness
from paceline.run import Run

SLOW = 1
"""On the ring a peer that answers offers and makes none."""


def rates(run: Run) -> tuple[float, float]:
    """Steps per second: of a fast peer, in the mean, and of the slow one."""
    each = {peer: 1.0 / seconds for peer, seconds in apartness(run.trace).iteration_s.items()}
    slow = each.pop(SLOW)
    return sum(each.values()) / len(each), slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--scenario", default="one-slow:factor=4,worker=1,compute_s=0.2")
    options = parser.parse_args()
    print(f"{options.peers} peers, {options.scenario}, {options.iterations} iterations each; steps per second")
    for policy in ("adpsgd:graph=ring", "adpsgd:graph=complete"):
        job = Job("digits-mlp", policy, options.peers, 1, options.scenario, options.iterations, None, None, None, 0)
        for runtime, run in (("virtual", simulate_job(job)), ("live", train_job_live(job))):
            fast, slow = rates(run)
            print(f"{policy:24} {runtime:8} fast {fast:5.1f}   slow {slow:5.1f}", flush=True)


if __name__ == "__main__":
    main()
