"""What checksums cost a push between hosts without keys, in processor time: with them and without, in turn.

    python benchmarks/checksum_cost.py [--params 1000000] [--rounds 5]

`compiled` is the loop in C (if it was compiled), `zlib` what a host without it uses, `none` leaves them out. The rates
over memory that is in a cache are printed first.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import zlib
from collections.abc import Callable

from paceline.bench.exchange import counts, measure_paceline
from paceline.runtime.live.messaging import checksum, greetings, seals
from paceline.runtime.live.protocol.configuration import MultihostOptions

WORKERS = 4


def none(data: object, value: int = 0) -> int:
    return 0


KINDS: dict[str, Callable[..., int]] = {"compiled": checksum.crc32, "zlib": zlib.crc32, "none": none}


def rate(sum_up: Callable[..., int]) -> float:
    """Gigabytes a second, the best of many."""
    data, best = bytes(1 << 22), 0.0
    for _ in range(50):
        began = time.perf_counter()
        sum_up(data)
        best = max(best, len(data) / (time.perf_counter() - began) / 1e9)
    return best


def processor_time_s() -> float:
    """Of this process and of all it has started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, sum_up in list(KINDS.items())[:2]:
        print(f"{name}: {rate(sum_up):.1f} GB/s")
    count = {**counts(int(options.params)), "transport": "tcp"}
    multihost = MultihostOptions("127.0.0.1", "", keys=False, shared_memory=False)
    spent: dict[str, list[float]] = {name: [] for name in KINDS}
    for number in range(options.rounds):
        for name, sum_up in KINDS.items():
            # Workers and servers are forks of this process.
            greetings.crc32 = seals.crc32 = sum_up  # type: ignore[assignment]
            before = processor_time_s()
            measure_paceline("asp", WORKERS, count, multihost)
            pushes = WORKERS * (count["warm"] + count["count"])
            spent[name].append(1000 * (processor_time_s() - before) / pushes)
        latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in spent.items())
        print(f"round {number + 1}/{options.rounds}: {latest} ms of processor time a push", flush=True)
    print("medians: " + ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in spent.items()))


if __name__ == "__main__":
    main()
