"""How often a torch RPC parameter server hands out what is not one version of the parameters, with and without a lock.

    python benchmarks/rpc_tears.py --params 1000000

All gradients are equal everywhere, so all parameters of a version are the same number. An answer with two numbers in it
was changed while it was sent; or two threads have stepped at once, and lost a part of one gradient: then all answers
after that have two numbers, and the share depends on when that happened first.

`paceline bench exchange` compares with the server that has the lock, and prints the other's speed.
"""

from __future__ import annotations

import argparse

from paceline.bench import competitors

WORKERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--answers", type=int, default=200, help="of each worker")
    options = parser.parse_args()
    wanted = {"params": int(options.params), "warm": 20, "count": options.answers, "transport": "shm", "look": True}
    for name, server in (("without a lock", "rpc_unlocked"), ("with a lock", "rpc")):
        shares = competitors.measure(server, WORKERS + 1, wanted)[1:]
        print(f"{name}: {sum(shares) / WORKERS:.1%} of {WORKERS * options.answers} answers are not one version")


if __name__ == "__main__":
    main()
