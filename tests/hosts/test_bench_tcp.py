"""`paceline bench exchange --transport tcp`: that all who are compared do go over TCP.

On a host of its own nobody else uses the loopback, so what went over it can be counted.
"""

from __future__ import annotations

import json
import sys

import pytest

from paceline.bench import competitors
from paceline.bench.hosts.netns import Hosts

PARAMS, WARM, COUNT, WORKERS = 100_000, 2, 20, 2
NEEDED = 2 * 4 * PARAMS * (WARM + COUNT) * WORKERS
"""Bytes of gradients there and of parameters back."""

MEASURE = """
import json, sys
from pathlib import Path
from paceline.bench import exchange, competitors
from paceline.runtime.live.protocol.configuration import MultihostOptions
def carried():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])
who, options = sys.argv[1], json.loads(sys.argv[2])
before = carried()
if who == "paceline":
    abroad = None
    if options["transport"] == "tcp":
        abroad = MultihostOptions("127.0.0.1", "", keys=False, wire=options["wire"], shared_memory=False)
    rate = exchange.measure_paceline("asp", 2, options, abroad)[0]
else:
    rate = sum(competitors.measure(who, 3 if who == "rpc" else 2, options))
assert rate > 0
print(carried() - before)
"""


def carried(who: str, transport: str, wire: str = "float32") -> int:
    """Bytes over the loopback while somebody is measured."""
    options = {"params": PARAMS, "warm": WARM, "count": COUNT, "transport": transport, "wire": wire}
    with Hosts(1) as hosts:
        printed = hosts[0].run([sys.executable, "-c", MEASURE, who, json.dumps(options)], timeout=110)
    return int(printed.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("who", ["paceline", "rpc"])
def test_everything_travels_with_tcp_and_nothing_with_shared_memory(who: str) -> None:
    assert NEEDED < carried(who, "tcp") < 1.3 * NEEDED
    assert carried(who, "shm") < 0.1 * NEEDED


@pytest.mark.long
def test_bfloat16_is_half_of_it() -> None:
    assert NEEDED / 2 < carried("paceline", "tcp", "bfloat16") < 0.65 * NEEDED


@pytest.mark.long
@pytest.mark.skipif(not competitors.has_ray(), reason="ray is not installed")
def test_ray_with_two_nodes_goes_over_tcp() -> None:
    assert carried("ray", "tcp") > NEEDED
