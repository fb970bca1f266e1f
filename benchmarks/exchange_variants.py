"""What each part of the exchange through shared memory is worth: with it and without it, in turn, in one run.

    python benchmarks/exchange_variants.py --mode asp --params 1e6 --rounds 7 now awake
    python benchmarks/exchange_variants.py --mode bsp --params 1e6 now own torch
    python benchmarks/exchange_variants.py --mode asp --params 1e6 now torch
    python benchmarks/exchange_variants.py --mode asp --params 1e7 now each through hasty
    python benchmarks/exchange_variants.py --mode bsp --params 1e7 threads=1 threads=4 threads=16

    now         as it is
    awake       workers that are woken take the core at once (no SCHED_BATCH)
    own         under BSP too everybody has a segment of their own, and the server writes to all of them
    each        pushes that have come together are stepped on one by one
    together    they are stepped on in one pass, however small the model
    hasty       the server steps on what there is, and does not let others finish first
    through     large gradients are copied through the caches
    torch       all passes over memory are torch's, as where there was no C compiler
    threads=N   the server steps with N threads, whatever the machine has

What a variant leaves out is no option of a run, since nobody is to choose it: so it is patched, here and nowhere in
`src`, in this process, of which all others are forks.

`paceline bench exchange` has the figures beside DDP's, torch RPC's and Ray's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from paceline.bench import exchange
from paceline.policies import BSP
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.server import push_batching
from paceline.runtime.live.server.server import LiveServer
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.runtime.live.worker import host_copies, startup
from paceline.tensors import fused_kernels, shard_optimizer
from paceline.tensors.shard_optimizer import ThreadCounts


@contextmanager
def changed(variant: str) -> Iterator[None]:
    """Servers and workers are forks of this process: what is changed here is changed there."""
    name, _, number = variant.partition("=")
    with mock.patch.object(shard_optimizer, "MOST_THREADS", 1 << 10 if number else shard_optimizer.MOST_THREADS):
        if name == "awake":
            change = mock.patch.object(startup, "give_way", return_value=None)
        elif name == "own":
            change = mock.patch.object(BSP, "in_step", False)
        elif name == "together":
            change = mock.patch.object(push_batching, "WORTH_IT", 0)
        elif name == "each":
            change = mock.patch.object(ShardExecutor, "defer", return_value=False)
        elif name == "hasty":
            change = mock.patch.object(LiveServer, "let_others_run", return_value=None)
        elif name == "through":
            change = mock.patch.object(host_copies, "AROUND", 1 << 62)
        elif name == "torch":
            change = mock.patch.object(fused_kernels, "_passes", None)
        elif name == "threads":
            change = mock.patch.object(ThreadCounts, "of", return_value=ThreadCounts(int(number), int(number)))
        elif variant == "now":
            change = mock.patch.object(startup, "give_way", startup.give_way)
        else:
            raise SystemExit(f"there is no variant {variant!r}: see --help")
        with change:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--mode", choices=("asp", "bsp"), default="asp")
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tcp", action="store_true", help="over TCP on the loopback, without keys")
    options = parser.parse_args()
    multihost = MultihostOptions("127.0.0.1", "", keys=False, shared_memory=False) if options.tcp else None
    counts = {**exchange.counts(int(options.params)), "transport": "tcp" if options.tcp else "shm"}
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for variant in options.variants:
            with changed(variant):
                rate, _floats = exchange.measure_paceline(options.mode, options.workers, counts, multihost)
            found.setdefault(variant, []).append(rate if options.mode == "asp" else 1000 * options.workers / rate)
    unit = "pushes/s" if options.mode == "asp" else "ms an iteration"
    for variant, values in found.items():
        each = " ".join(f"{value:.4g}" for value in values)
        print(f"{options.mode} {options.params:.0e} {variant}: {statistics.median(values):.4g} {unit}  ({each})")


if __name__ == "__main__":
    main()
