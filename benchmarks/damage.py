"""Damage the files of killed runs at random places, and look at what a resumed run would start from. A command, not a
test (`tests/live/test_damage.py` does some of it):

    python benchmarks/damage.py --cases 2000

Two runs are made, one durable and one with checkpoints only, and their drivers are killed with -9. For each case one
file of a copy is damaged: a log, a snapshot, the file that says where a log ends, a file of a checkpoint, a manifest.
Then a state to start from is looked for as `paceline resume` does. It is compared with what it must be, known from
outside: every gradient is the same vector, so that parameters and momentum follow from the number of updates. A case is

    refused      one line that says what is damaged, and going on from any checkpoint it lists gives that checkpoint
    older        an older checkpoint, or an older state of LR schedulers, is used, it is right, and a line names it
    unharmed     the newest state is recovered, in full: the byte did not matter
    WRONG        anything else: the command exits with 1
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline import policies
from paceline.cluster import load
from paceline.core.messages import Members
from paceline.errors import Damaged, PacelineError
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.durability import find_start
from paceline.runtime.live.driver.lr_scheduler_states import read_beside_logs
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import checkpoint, shared_memory, update_log
from paceline.runtime.live.storage.checksums import ChecksummedFile, with_checksum

NUMEL, WORKERS, SERVERS = 600, 2, 2
LR, MOMENTUM = 2.0, 0.5
CUT = 304
"""Where the second shard begins: half of the 38 cache lines of 600 floats."""
LEAST_UPDATES, EVENTS = 230, 150
GRADIENT = (np.arange(NUMEL) % 7 - 3).astype(np.float32)
BUFFER = np.arange(5, dtype=np.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))
        self.register_buffer("fixed", torch.from_numpy(BUFFER.copy()))


def work(noted: Path) -> None:
    """Every gradient is the same; each acknowledged step is a byte in the file."""
    model = Model()
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), model=model)
    scheduler = opt.attach(torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0))
    while True:
        model.weight.grad = torch.from_numpy(GRADIENT.copy())
        opt.step()
        scheduler.step()
        with noted.open("ab") as file:
            file.write(b".")


@cache
def truth(version: int) -> tuple[np.ndarray, np.ndarray]:
    """Parameters and momentum after so many updates, each of one gradient at the rate lr / workers."""
    values = momentum = np.zeros(NUMEL, np.float32)
    for _ in range(version):
        momentum = MOMENTUM * momentum + GRADIENT
        values = values - LR / WORKERS * momentum
    return values, momentum


class Newest(NamedTuple):
    """What a resumed run starts from: the version of each shard, the states of LR schedulers."""

    versions: tuple[int, ...]
    schedulers: bytes


class Killed(NamedTuple):
    """A run that was killed: its folder, whether it has logs, and what a resumed run must start from."""

    folder: Path
    durable: bool
    newest: Newest


def kill_a_run(folder: Path, is_durable: bool) -> Killed:
    """Run in a process of its own, and kill that, when it has checkpoints and has gone on from the last.

    The run goes on while it is looked at: one that has begun another segment before it died is not the one to damage.
    """
    while (killed := kill_once(folder, is_durable)) is None:
        shutil.rmtree(folder)
    return killed


def kill_once(folder: Path, is_durable: bool) -> Killed | None:
    noted = folder.with_name(f"{folder.name}-noted")
    noted.write_bytes(b"")
    pid = os.fork()
    if pid == 0:
        try:
            how = DurabilityOptions(events=EVENTS) if is_durable else None
            plan = RunPlan(
                Members(WORKERS, SERVERS), function_starter(partial(work, noted)), policies.parse("asp"),
                load("steady:compute_s=0.001"), checkpointing=CheckpointOptions(folder, every_updates=50, durable=how),
            )  # fmt: skip
            Driver(plan, say=lambda line: None).run()
        finally:
            os._exit(1)
    checkpoints = folder / checkpoint.FOLDER
    while (
        len(noted.read_bytes()) < LEAST_UPDATES
        or len(checkpoint.whole(checkpoints)) < checkpoint.KEEP
        or not all(map(is_long, folder.glob(f"{update_log.FOLDER}/shard-*")))
        or (is_durable and not has_newer_schedulers(folder))
    ):
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    acknowledged = len(noted.read_bytes())
    for left in [*checkpoints.glob(f"*{checkpoint.PART}"), *checkpoint.whole(checkpoints)[: -checkpoint.KEEP]]:
        shutil.rmtree(left)
    while shared_memory.remove_stale() or any(map(is_held, folder.glob(f"{update_log.FOLDER}/shard-*"))):
        time.sleep(0.01)  # the kernel ends the servers with it
    if not all(map(is_long, folder.glob(f"{update_log.FOLDER}/shard-*"))):
        return None
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        copy = Path(scratch) / "copy"
        link(folder, copy)
        newest, found, _ = recovered(copy, is_durable)
        assert found == "", found
    assert not is_durable or min(newest.versions) >= acknowledged, (newest, acknowledged)
    return Killed(folder, is_durable, newest)


def is_long(folder: Path) -> bool:
    """Whether the segment that is written now, not the first, has many records."""
    return (
        update_log.numbers(folder, update_log.LOG)[-1] > 2 and update_log.read_end(folder).serial % EVENTS > EVENTS // 2
    )


def has_newer_schedulers(folder: Path) -> bool:
    """Whether the states of LR schedulers beside the logs are not those of the newest checkpoint."""
    try:
        newest = checkpoint.read(checkpoint.whole(folder / checkpoint.FOLDER)[-1])
        return newest.schedulers != read_beside_logs(folder)
    except Damaged:
        return False  # another was made, and this one removed


def is_held(folder: Path) -> bool:
    try:
        os.close(update_log.hold(folder))
    except PacelineError:
        return True
    return False


def link(folder: Path, copy: Path) -> None:
    """A copy whose files are the same until one of them is replaced."""
    shutil.copytree(folder, copy, copy_function=os.link, ignore=shutil.ignore_patterns("*.part", "trace"))


def recovered(folder: Path, is_durable: bool) -> tuple[Newest, str, list[str]]:
    """What a resumed run would start from, what is wrong with it, and what was said."""
    said: list[str] = []
    path = find_start(folder, is_durable, None, said.append)
    if path is None:
        return Newest((), b""), "it starts from the beginning", said
    manifest = checkpoint.read(path)
    return Newest(tuple(shard.version for shard in manifest.shards), manifest.schedulers), wrong_in(path), said


def wrong_in(path: Path) -> str:
    """What in a checkpoint is not what it must be, by its versions; "" if all is."""
    manifest = checkpoint.check(path)
    versions = [shard.version for shard in manifest.shards]
    if len(versions) != SERVERS:
        return f"it has {len(versions)} shards"
    values, learned = checkpoint.load_part(path, manifest, ((0, NUMEL),))
    for part, version in zip((slice(0, CUT), slice(CUT, NUMEL)), versions, strict=True):
        for name, found, right in zip(
            ("values", "momentum"), (values, learned["momentum_buffer"]), truth(version), strict=True
        ):
            if not np.allclose(found.numpy()[part], right[part], rtol=1e-6, atol=1e-4):
                return f"the {name} of {part} are not those of version {version}"
    if not np.array_equal(load_file(checkpoint.others_of(path))["fixed"].numpy(), BUFFER):
        return "the buffer is another"
    return ""


# How files are damaged.


def flip(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def overwrite(data: bytearray, dice: random.Random) -> None:
    at, length = dice.randrange(len(data)), dice.choice((1, 2, 8, 64, 700))
    data[at : at + length] = dice.randbytes(len(data[at : at + length]))


def clear(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data)) // 512 * 512
    data[at : at + 512] = bytes(len(data[at : at + 512]))


def truncate(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def insert(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data))
    data[at:at] = dice.randbytes(dice.choice((1, 4, 100)))


def remove(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data))
    del data[at : at + dice.choice((1, 64, 1000))]


def repeat(data: bytearray, dice: random.Random) -> None:
    """A part of the file stands where another should, as after a misdirected write."""
    length = min(len(data), dice.choice((64, 512, 4096)))
    here, there = (dice.randrange(len(data) - length + 1) for _ in range(2))
    data[there : there + length] = data[here : here + length]


def append(data: bytearray, dice: random.Random) -> None:
    """What a torn write, or an older segment, leaves behind the end."""
    data += dice.choice((dice.randbytes(300), bytes(data[-1000:]), bytes(data[:500])))


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip, flip, flip, flip, overwrite, overwrite, clear, truncate, insert, remove, repeat, append,
)  # fmt: skip
ABSURD = (-1, -(1 << 40), 1 << 50, 1 << 62)


def make_absurd(path: Path, dice: random.Random) -> bytes:
    """A manifest with a number that cannot be, or the wrong number of shards, and a checksum that is right."""
    content: Any = msgspec.json.decode(msgspec.json.decode(path.read_bytes(), type=ChecksummedFile).content)
    if "others_sha256" in content and "layout" not in content:  # that of the logs
        content["shards"] = dice.choice((*ABSURD, 0, 1, 3))
    else:
        shard = dice.choice(content["shards"])
        match dice.randrange(13):
            case 0:
                content["number"] = dice.choice(ABSURD)
            case 1:
                shard[dice.choice(("iteration", "version"))] = dice.choice(ABSURD)
            case 2:
                content["shards"].remove(shard)
            case 3:
                content["shards"].append(shard)
            case 4:
                content["layout"][0][0][1] = [dice.choice((*ABSURD, NUMEL + 1, NUMEL - 1, 0))]
            case 5:
                content["layout"][1] = dice.choice(("float64", "float99", ""))
            case 6:
                content["assignment"][1][0][dice.randrange(2)] = dice.choice((*ABSURD, 3))
            case 7:
                shard["file"] = dice.choice(("../shard-0.safetensors", "/etc/passwd", "", "manifest.json"))
            case 8:
                dice.choice(content["layout"][0])[2] = dice.choice(ABSURD)
            case 9:
                content["layout"][2] = dice.choice(("nowhere", "", "Tensors"))
            case 10:
                content["epochs"] = dice.choice(({-1: 0}, {1 << 62: 0}, {0: -1}, {0: 1 << 40}))
            case 11:
                content["policy"] = "ssp:staleness=3+" * 6250
            case 12:
                content["layout"][0].append(content["layout"][0][0])
    return with_checksum(content)


def is_taken(folder: Path) -> bool:
    """Whether a checkpoint is not refused in one line: any other error than that is wrong, too."""
    try:
        checkpoint.check(folder)
    except Damaged:
        return False
    except Exception:
        return True
    return True


TARGETS = {
    "log": ("durable/shard-*/*.log", 30),
    "snapshot": ("durable/shard-*/*.snapshot", 12),
    "end of a log": ("durable/shard-*/end", 8),
    "logs' manifest": ("durable/manifest.json", 4),
    "logs' others": ("durable/others.safetensors", 4),
    "logs' schedulers": ("durable/schedulers", 4),
    "checkpoint, shard": ("checkpoints/*/shard-*", 20),
    "checkpoint, manifest": ("checkpoints/*/manifest.json", 14),
    "checkpoint, others": ("checkpoints/*/others.safetensors", 8),
}
"""Which files, and how often."""


def case(run: Killed, number: int, scratch: Path) -> tuple[str, str, str]:
    """Damage one file of a copy; what kind of file, what became of it, and a line that describes it."""
    dice = random.Random(number)
    found = {name: sorted(run.folder.glob(pattern)) for name, (pattern, _) in TARGETS.items()}
    names = [name for name, paths in found.items() if paths]
    target = dice.choices(names, [TARGETS[name][1] for name in names])[0]
    original = dice.choice(found[target])
    copy = scratch / f"case-{number}"
    link(run.folder, copy)
    path = copy / original.relative_to(run.folder)
    before = original.read_bytes()
    roll = dice.random()
    if roll < 0.06:
        deed, after = "delete", None
    elif roll < 0.4 and target.endswith("manifest"):
        deed, after = "absurd", make_absurd(original, dice)
    else:
        kind = dice.choice(KINDS)
        data = bytearray(before)
        if data:
            kind(data, dice)
        deed, after = kind.__name__, bytes(data)
    path.unlink()
    if after is not None:
        path.write_bytes(after)
    what = f"case {number}: {deed} in {original.relative_to(run.folder)}"
    taken = deed == "absurd" and target == "checkpoint, manifest" and is_taken(path.parent)
    try:
        outcome, line = judge(run, copy)
        if taken:
            outcome, line = "WRONG", "what the manifest says cannot be, and it was taken"
    except Exception as error:
        outcome, line = "WRONG", f"{type(error).__name__}: {error}"
    shutil.rmtree(copy)
    return target, outcome, f"{what}: {outcome}: {line}"


def judge(run: Killed, copy: Path) -> tuple[str, str]:
    try:
        found, wrong, said = recovered(copy, run.durable)
    except Damaged as problem:
        return judge_refusal(copy, str(problem))
    if wrong:
        return "WRONG", wrong
    if found == run.newest:
        return "unharmed", "; ".join(said)
    warnings = [line for line in said if line.startswith("WARNING: ")]
    if found.versions == run.newest.versions:
        named = any("; LR schedulers are those of checkpoint" in line for line in warnings)
    else:
        named = any(f"update {min(found.versions)}" in line for line in warnings)
    if named and all(here <= there for here, there in zip(found.versions, run.newest.versions, strict=True)):
        return "older", "; ".join(said)
    return "WRONG", f"{found} instead of {run.newest}, and it says {said}"


def judge_refusal(copy: Path, line: str) -> tuple[str, str]:
    """A refusal is one line, and the checkpoints it lists can be used, and are right."""
    if "\n" in line:
        return "WRONG", f"more than one line: {line!r}"
    for path in checkpoint.whole(copy / checkpoint.FOLDER):
        try:
            checkpoint.check(path)
        except Damaged:
            continue
        start = find_start(copy, True, int(path.name), lambda line: None)
        if f"{int(path.name)}, at " not in line or start is None or (wrong := wrong_in(start)):
            return "WRONG", f"{path} could be used: {wrong or line}"
    return "refused", line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", default="WRONG", help="print the cases with this outcome")
    options = parser.parse_args()
    table: Counter[tuple[str, str]] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=shared_memory.base_folder(), prefix="damage-") as scratch:
        runs = [kill_a_run(Path(scratch) / name, name == "durable") for name in ("durable", "plain")]
        for number in range(options.seed, options.seed + options.cases):
            target, outcome, line = case(runs[number % 3 == 0], number, Path(scratch))
            table[target, outcome] += 1
            if outcome == options.show:
                print(line)
    outcomes = ("refused", "older", "unharmed", "WRONG")
    print(f"{'damaged':22}" + "".join(f"{each:>10}" for each in outcomes))
    for target in TARGETS:
        print(f"{target:22}" + "".join(f"{table[target, each]:10}" for each in outcomes))
    totals = [sum(count for (_, found), count in table.items() if found == each) for each in outcomes]
    print(f"{'all':22}" + "".join(f"{total:10}" for total in totals))
    print(f"{options.cases} cases in {time.monotonic() - started:.0f} s")
    return 1 if totals[-1] else 0


if __name__ == "__main__":
    sys.exit(main())
