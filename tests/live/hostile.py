"""Feeds texts of a hostile host to whatever reads such texts, in a process that watches what is opened and run.

    python hostile.py FOLDER        FOLDER has evil.py, evil.safetensors, evil.edges, evil.jsonl and nonce

Prints a line for each file of FOLDER, or outside of the folders a run has, that was touched, and how many texts were
read. `test_hostile_texts.py` expects no such line.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from paceline import policies, user_code
from paceline.core.messages import Members, View
from paceline.errors import PacelineError
from paceline.runtime.live.driver import agent_validation
from paceline.runtime.live.protocol import driver_texts, wire
from paceline.runtime.live.protocol.configuration import Endpoint, LiveConfig
from paceline.runtime.live.storage import checkpoint, endpoints, file_transfer
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.optimizers import Extras, OptimizerSpec

evil = Path(sys.argv[1])
touched: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    """Note every file of the evil folder, and every file at all that is run (dataclasses read their own types)."""
    if watching and event in ("open", "exec", "import", "os.mkdir", "os.rename", "os.symlink", "os.remove", "compile"):
        where = " ".join(map(str, arguments))
        if str(evil) in where or "passwd" in where or (event == "exec" and "<string>" not in where):
            touched.append(f"{event}: {where[:200]}")


POLICIES = [
    "{evil}/evil.py:Evil", "{evil}/evil.py:Evil:bound=2", " {evil}/evil.py : Evil", "bsp+{evil}/evil.py:Evil",
    "bsp@0,{evil}/evil.py:Evil@3", "waiting:base={evil}/evil.py:Evil", "scheduled:base={evil}/evil.py:Evil()",
    "specsync:base=waiting(base={evil}/evil.py:Evil)", "elastic:base={evil}/evil.py:Evil", "~/evil.py:Evil",
    "./evil.py:Evil", "../evil.py:Evil", "evil.py:Evil", "evil", "hop:graph={evil}/evil.edges",
    "adpsgd:graph={evil}/evil.edges", "hop:graph=elsewhere:{evil}/evil.edges", "hop:graph=file://{evil}/evil.edges",
    "~0\0", "~9999\0:x", "bsp@" + "9" * 5000, "ssp:staleness=" + "9" * 5000, "waiting:base=" * 300 + "asp", "",
    "\x1b[2J", "ssp:staleness=nan", "pssp:probability=1/0", "os.system:x=1", "paceline.user_code:path={evil}",
]  # fmt: skip
NAMES = [
    "../evil", "{evil}/evil.safetensors", "/etc/passwd", "config", "driver", "nonce", "lock", "key-0.0", "worker-0.0",
    "trace/../../x", "checkpoint-in/../config", "checkpoint-in/x/y", "others\0", "whole\n", ".whole.part", "..", ".",
    "", "moved-1-2-3/../config", "trace/worker-0.0.trace", "checkpoint-in/manifest.json\0", "x" * 300, "a/" * 90,
]  # fmt: skip


def texts(seeds: list[str], count: int) -> Iterator[str]:
    """These texts, and as many again with letters changed, gone, doubled or put together."""
    chance = random.Random(0)
    given = [seed.replace("{evil}", str(evil)) for seed in seeds]
    yield from given
    for _ in range(count):
        text = list(chance.choice(given)[:300])
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(text) + 1)
            change = chance.randrange(3)
            if change == 0:
                text[at : at + chance.randrange(3)] = chance.choice("\0\n /.:~+@,()=%$\x1ba0")
            elif change == 1:
                text[at:at] = chance.choice(given)[:60]
            else:
                del text[at : at + chance.randrange(5)]
        yield "".join(text)


def read(reader: Callable[[str], object], seeds: list[str], count: int = 300) -> int:
    """Have `reader` read them all; it may refuse them in paceline's words only."""
    number = 0
    for text in texts(seeds, count):
        number += 1
        with contextlib.suppress(PacelineError, msgspec.MsgspecError):
            reader(text)
    return number


def guest(**values: object) -> LiveConfig:
    return msgspec.structs.replace(LiveConfig(Members(2, 1), 0, None, "", "eps", guest=True), **values)


def use_policy(text: str) -> None:
    """As a driver does with what worker 0 of another host says, and a worker with what a driver says."""
    policies.parse_remote(text).validate(Members(4, 2))
    driver_texts.policy_of(text, guest()).machine("worker", 0, Members(4, 2), 0)


def use_scenario(text: str) -> None:
    for table in (
        {"model": "replay", "file": text},
        {"model": text},
        {"slowdown": [{"model": "replay", "file": text}]},
    ):
        with contextlib.suppress(PacelineError):
            scenario = driver_texts.scenario_of(guest(cluster=table))
            if scenario is not None:
                next(iter(scenario.factors(0, 2, None)), None)  # type: ignore[arg-type]
                scenario.undisturbed_s()


def use_manifest(text: str) -> None:
    shard = {"file": text, "sha256": "", "iteration": 0, "version": 0}
    manifest = {
        "number": 0,
        "policy": "bsp",
        "layout": [[["a", [1], 0]], "float32"],
        "shards": [shard],
        "others": "others",
    }
    with contextlib.suppress(OSError):  # there is no such file in the checkpoint
        checkpoint.load_part(
            run, msgspec.json.decode(msgspec.json.encode(manifest), type=checkpoint.Manifest), ((0, 1),)
        )


def use_door(text: str) -> None:
    nonce = (evil / endpoints.NONCE).parent.name  # what is in the file: the attacker knows it
    endpoint = Endpoint(0, text, nonce, "tcp://127.0.0.1:1")
    if endpoints.shared_folder(run, endpoint) not in (None, run):
        touched.append(f"door: {text}")


def use_description(text: str) -> None:
    for layout, optimizer in (
        (Layout((Entry(text, (1,), 0),), "float32"), OptimizerSpec(text, ({"lr": 0.1},))),
        (Layout((Entry("a", (1,), 0),), text), OptimizerSpec("sgd", ({"lr": 0.1},))),
        (Layout((Entry("a", (1,), 0),), "float32", text, text), OptimizerSpec("sgd", ({"lr": 0.1},))),
        (
            Layout((Entry("a", (1,), 0),), "float32"),
            OptimizerSpec("sgd", ({"lr": 0.1},), Extras(schedule=text, batch=1)),
        ),
    ):
        with contextlib.suppress(PacelineError):
            agent_validation.check_described(wire.Describe(0, 0, text, layout, optimizer, text, {text: text}))


def unpack(text: str) -> None:
    file_transfer.check_from_driver(text, 1)
    file_transfer.unpack(run, text, 0, 1, b"x")


def unpack_anything(text: str) -> None:
    """Even where nobody has asked whether the name may be."""
    file_transfer.unpack(run, text, 0, 1, b"x")


run = Path(tempfile.mkdtemp()) / "run"
run.mkdir()
for warm in ("bsp", "hop:graph=ring", "adpsgd", "elastic", "specsync"):  # what these import is not the texts' doing
    with contextlib.suppress(PacelineError):
        use_policy(warm)
use_scenario("x")
use_description("linear")
View(0, ())
sys.addaudithook(watch)
watching = True
count = read(use_policy, POLICIES, 1500)
for reader in (use_scenario, use_manifest, use_door, use_description):
    count += read(reader, [*POLICIES, *NAMES])
count += read(unpack, NAMES) + read(unpack_anything, NAMES)
watching = False
outside = [path for path in run.parent.iterdir() if path != run]
touched += [f"written: {path}" for path in outside]
assert not user_code.is_remote()
print("\n".join(touched))
print(f"read {count} texts")
