"""Damaged logs, snapshots, checkpoints and manifests: refused in one line, or recovered with the older state named."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

import paceline
from benchmarks import damage
from benchmarks.damage import CUT, NUMEL, Killed
from paceline import cli, run_folder
from paceline.errors import ConfigError, Damaged
from paceline.runtime.live.driver import durability
from paceline.runtime.live.driver.checkpointing import Checkpointer, CheckpointOptions, Resumed
from paceline.runtime.live.driver.durability import find_start, replay, salvage
from paceline.runtime.live.driver.lr_scheduler_states import read_beside_logs
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.server import log_replay
from paceline.runtime.live.storage import checkpoint, checksums, update_log
from paceline.runtime.live.storage.checksums import with_checksum
from paceline.runtime.live.storage.update_log import BEGINNING, LogEnd, LogReader, LogSegment
from paceline.tensors.layout import Entry, Layout
from tests.live.conftest import children

CASES = 300

SCRIPT = """
import sys
import torch
import paceline

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(600))
        self.register_buffer("fixed", torch.zeros(5))

model = Model()
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.5), model=model)
first = opt.global_step
while opt.global_step < first + 10:
    model.weight.grad = torch.arange(600.0) % 7 - 3
    opt.step()
print("buffer", model.fixed.tolist())
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Killed]]:
    """Two killed runs: with logs, and with checkpoints only."""
    folder = tmp_path_factory.mktemp("killed")
    yield {is_durable: damage.kill_a_run(folder / f"run-{is_durable}", is_durable) for is_durable in (True, False)}
    assert not children()


@pytest.fixture
def copy(killed: dict[bool, Killed], tmp_path: Path) -> Callable[[bool], Path]:
    def make(is_durable: bool) -> Path:
        shutil.copytree(killed[is_durable].folder, tmp_path / "copy")
        return tmp_path / "copy"

    return make


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def damage_log(folder: Path, shard: int = 0) -> Path:
    """Flip a bit of a record in the midst of those that a log has since its newest snapshot; the file."""
    shard_folder = update_log.folder_of(folder, shard)
    number = update_log.numbers(shard_folder, update_log.SNAPSHOT)[-1]
    meta, _, _ = update_log.read_snapshot(update_log.snapshot_path(shard_folder, number))
    ends = [entry.end for entry in LogReader(shard_folder, number, meta.serial)]
    path = update_log.log_path(shard_folder, number)
    data = bytearray(path.read_bytes())
    data[ends[len(ends) // 2]] ^= 1
    path.write_bytes(data)
    return path


def test_random_damage_is_refused_or_said_or_does_not_matter(killed: dict[bool, Killed], tmp_path: Path) -> None:
    """Two thousand: `python benchmarks/damage.py --cases 2000`."""
    seen: Counter[str] = Counter()
    for number in range(CASES):
        _, outcome, line = damage.case(killed[number % 3 != 0], number, tmp_path)
        assert outcome != "WRONG", line
        seen[outcome] += 1
    assert min(seen["refused"], seen["older"], seen["unharmed"]) > CASES // 20


class Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


def ignoring_damage(run: Path) -> bytes:
    try:
        return read_beside_logs(run)
    except Damaged:
        return b""


def in_silence(run: Path, is_durable: bool, number: int | None, say: Callable[[str], None]) -> Path | None:
    return find_start(run, is_durable, number, lambda line: None)


BROKEN: dict[str, tuple[object, str, object]] = {
    "a log ends where it cannot be read": (log_replay.update_log, "read_end", lambda folder: BEGINNING),
    "any checksum of a snapshot": (update_log, "tensors_checksum", lambda tensors: Anything()),
    "any checksum of a manifest": (
        checksums.hashlib, "sha256", lambda data: SimpleNamespace(hexdigest=Anything),
    ),
    "any file of a checkpoint": (checkpoint, "check_file", lambda path, sha256: None),
    "any number in a manifest": (checkpoint, "_impossibility", lambda manifest: None),
    "nothing is said": (damage, "find_start", in_silence),
    "lost schedulers are not said": (durability, "read_beside_logs", ignoring_damage),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_the_judge_sees_each_rule_that_is_broken(
    killed: dict[bool, Killed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(*BROKEN[rule])
    outcomes = (damage.case(killed[number % 3 != 0], number, tmp_path)[1] for number in range(2 * CASES))
    assert "WRONG" in outcomes


def test_a_byte_in_the_midst_of_a_log_is_damage_and_the_way_on_is_told(
    copy: Callable[[bool], Path], killed: dict[bool, Killed], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy(True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {"script": str(script), "arguments": [], "workers": 2, "servers": 2, "policy": "asp", "durable": True}
    run_folder.write_config(folder, options)
    path = damage_log(folder)
    end = update_log.read_end(path.parent)
    checkpoints = folder / checkpoint.FOLDER
    number = int(checkpoint.whole(checkpoints)[-1].name)
    for command in (["resume", str(folder)], ["replay", str(folder)]):
        assert cli.run(command) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert re.search(rf"{path} is damaged at byte \d+: \d+ records cannot be read", line)
        assert re.search(rf"with them \d+ of the {end.version} updates of server 0", line)
        assert f"paceline resume {folder} --from-checkpoint N" in line
        assert f"{number}, at iteration " in line
    assert cli.run(["resume", str(folder), "--from-checkpoint", "99"]) == 2
    assert f"there is no checkpoint 99 in {str(checkpoints)!r} (there are: " in capfd.readouterr().err
    before = checkpoint.read(checkpoints / f"{number:06d}")

    assert cli.run(["resume", str(folder), "--from-checkpoint", str(number)]) == 0
    assert f"buffer {damage.BUFFER.tolist()}" in capfd.readouterr().out
    after = checkpoint.latest(checkpoints)[1]
    assert after.number > number
    assert min(shard.version for shard in after.shards) >= max(shard.version for shard in before.shards) + 10
    assert cli.run(["replay", str(folder)]) == 0


def test_a_record_that_was_never_whole_is_dropped_and_nothing_else(
    copy: Callable[[bool], Path], killed: dict[bool, Killed]
) -> None:
    folder = copy(True)
    shard, rebuilt = next((shard, each) for shard, each in enumerate(replay(folder)) if each.position)
    log = update_log.log_path(update_log.folder_of(folder, shard), rebuilt.segment)
    whole = log.read_bytes()[: rebuilt.position]
    head = update_log.HEAD.pack(update_log.MARK, 100, 1000, rebuilt.serial, 12345)
    for torn in (b"", head[:10], head, head + bytes(90), head + bytes(900)):
        log.write_bytes(whole + torn)
        assert [each.machine.version for each in replay(folder)] == list(killed[True].newest.versions)
    log.write_bytes(whole[:-1])
    counted = LogEnd(rebuilt.serial, rebuilt.machine.version)  # the server may have been killed before it counted that
    (log.parent / update_log.END).write_bytes(2 * update_log.pack_end(counted))
    with pytest.raises(Damaged, match=rf"1 records .*, and with them . of the \d+ updates of server {shard}"):
        replay(folder)


def test_a_missing_log_is_an_error(copy: Callable[[bool], Path]) -> None:
    folder = copy(True)
    shutil.rmtree(update_log.folder_of(folder, 1))
    with pytest.raises(Damaged, match=r"shard-1, the log of server 1, is missing; paceline resume"):
        salvage(folder)
    shutil.rmtree(folder / update_log.FOLDER)
    with pytest.raises(Damaged, match="the logs of this durable run, is missing; paceline resume"):
        find_start(folder, True, None, print)
    shutil.rmtree(folder / checkpoint.FOLDER)
    said: list[str] = []
    assert find_start(folder, True, None, said.append) is None
    assert said == ["there is no checkpoint yet: the run starts from its beginning"]
    (folder / run_folder.MODEL).touch()
    with pytest.raises(ConfigError, match="has a model, but no checkpoint to go on from"):
        find_start(folder, True, None, print)


def test_the_logs_of_another_shard_are_not_taken_for_its_own(copy: Callable[[bool], Path]) -> None:
    folder = copy(True)
    shutil.rmtree(update_log.folder_of(folder, 1))
    shutil.copytree(update_log.folder_of(folder, 0), update_log.folder_of(folder, 1))
    with pytest.raises(Damaged, match="is a snapshot of shard 0"):
        salvage(folder)


def test_a_log_that_was_given_up_is_not_mixed_with_others(
    copy: Callable[[bool], Path], killed: dict[bool, Killed]
) -> None:
    folder = copy(True)
    end = update_log.read_end(update_log.folder_of(folder, 0))
    ended = update_log.pack_end(end._replace(given_up=True))
    (update_log.folder_of(folder, 0) / update_log.END).write_bytes(2 * ended)
    said: list[str] = []
    path = find_start(folder, True, None, said.append)
    newest = checkpoint.whole(killed[True].folder / checkpoint.FOLDER)[-1]
    assert path is not None
    assert path.name == newest.name
    (line,) = said
    assert f"server 0 could write no more of its after update {end.version}; going on from checkpoint" in line


def replaced(manifest: checkpoint.Manifest, **entry: object) -> Layout:
    """The layout of a manifest, with something else said of its first tensor."""
    first, *others = manifest.layout.entries
    return structs.replace(manifest.layout, entries=(structs.replace(first, **entry), *others))


ABSURD: dict[str, Callable[[checkpoint.Manifest], dict[str, object]]] = {
    "group -1": lambda manifest: {"layout": replaced(manifest, group=-1)},
    "group 2^62": lambda manifest: {"layout": replaced(manifest, group=1 << 62)},
    "borders": lambda manifest: {"layout": structs.replace(manifest.layout, borders="nowhere")},
    "sampler -1": lambda manifest: {"epochs": {-1: 0}},
    "sampler 2^62": lambda manifest: {"epochs": {1 << 62: 0}},
    "epoch -1": lambda manifest: {"epochs": {0: -1}},
    "epoch 2^47": lambda manifest: {"epochs": {0: 1 << 47}},
    "policy": lambda manifest: {"policy": "x" * 100_000},
    "two of a name": lambda manifest: {
        "layout": structs.replace(
            manifest.layout,
            entries=tuple(Entry("weight", (NUMEL // 2,), 0) for _ in range(2)),
        )
    },
}


@pytest.mark.parametrize("absurdity", ABSURD)
def test_a_manifest_that_cannot_be_is_refused_although_its_checksum_is_right(
    copy: Callable[[bool], Path], absurdity: str
) -> None:
    folder = copy(False)
    newest = checkpoint.whole(folder / checkpoint.FOLDER)[-1]
    manifest = checkpoint.read(newest)
    changed = structs.replace(manifest, **ABSURD[absurdity](manifest))
    (newest / checkpoint.MANIFEST).write_bytes(with_checksum(changed))
    with pytest.raises(Damaged, match=r"cannot be: ") as refused:
        checkpoint.read(newest)
    assert len(str(refused.value)) < 400
    (newest / checkpoint.MANIFEST).write_bytes(with_checksum(manifest))
    assert checkpoint.read(newest) == manifest


@pytest.mark.parametrize("file", ["shard-1.safetensors", "others.safetensors", "manifest.json"])
def test_an_older_checkpoint_is_used_and_both_are_named(copy: Callable[[bool], Path], file: str) -> None:
    folder = copy(False)
    older, newest = checkpoint.whole(folder / checkpoint.FOLDER)
    flip(newest / file, 0.5)
    said: list[str] = []
    assert find_start(folder, False, None, said.append) == older
    (line,) = said
    assert line.startswith(f"WARNING: checkpoint {int(newest.name)} is passed over: {newest / file} is damaged")
    assert f"going on from checkpoint {int(older.name)}, at iteration" in line
    flip(older / file, 0.5)
    with pytest.raises(Damaged, match=r"there is no whole checkpoint in .*; checkpoint .* is passed over"):
        find_start(folder, False, None, said.append)
    with pytest.raises(Damaged, match=r"cannot be used: .* \(there are: none that can be used\)"):
        find_start(folder, False, int(older.name), said.append)


def test_an_older_checkpoint_that_is_asked_for_stays_the_one_to_go_on_from(copy: Callable[[bool], Path]) -> None:
    """If the run dies again before its next checkpoint, what was passed over by hand must not come back."""
    folder = copy(False)
    older, newest = checkpoint.whole(folder / checkpoint.FOLDER)
    versions = [shard.version for shard in checkpoint.read(older).shards]
    said: list[str] = []
    start = find_start(folder, False, int(older.name), said.append)
    assert said == [f"going on from checkpoint {int(older.name)}, which is now the newest: {start}"]
    assert find_start(folder, False, None, said.append) == start
    manifest = checkpoint.check(start)
    assert manifest.number == int(newest.name) + 1
    assert [shard.version for shard in manifest.shards] == versions
    assert damage.wrong_in(start) == ""


def test_a_checkpoint_is_checked_as_far_as_it_is_used(copy: Callable[[bool], Path]) -> None:
    """The part of a server may lie in several files, if the number of servers has changed since."""
    older, newest = checkpoint.whole(copy(False) / checkpoint.FOLDER)
    flip(newest / "shard-1.safetensors", 0.9)
    checkpointer = Checkpointer(
        CheckpointOptions(newest.parent.parent, resume=True, from_checkpoint=int(older.name)), Resumed(older),
        lambda path: ({}, b""), lambda: True, newest / checkpoint.OTHERS, RunState(None), print,
    )  # fmt: skip
    for part, usable in [(((0, CUT),), newest), (((CUT - 8, CUT + 8),), older), (((CUT, NUMEL),), older)]:
        checkpointer.last = newest
        assert checkpointer.newest(part) == usable


def test_a_driver_killed_while_it_removes_old_logs_has_damaged_nothing(
    copy: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(True)
    start = find_start(folder, True, None, print)
    (tmp_path / "others").touch()
    remove = shutil.rmtree

    def remove_one(path: Path, **more: object) -> None:
        remove(path if path.name.startswith("shard-") else update_log.folder_of(folder, 0))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", remove_one)
    options = CheckpointOptions(folder, durable=DurabilityOptions())
    with pytest.raises(KeyboardInterrupt):
        durability.Durability(options, tmp_path / "others", print).begin(2)
    assert find_start(folder, True, None, print) == start


def test_lost_states_of_schedulers_are_said(copy: Callable[[bool], Path], killed: dict[bool, Killed]) -> None:
    folder = copy(True)
    flip(folder / update_log.FOLDER / "schedulers", 0.9)
    said: list[str] = []
    assert find_start(folder, True, None, said.append) is not None
    number = int(checkpoint.whole(killed[True].folder / checkpoint.FOLDER)[-1].name)
    assert re.search(
        rf"WARNING: .*/schedulers is damaged: .*; LR schedulers are those of checkpoint {number}$", said[0]
    )


@pytest.mark.parametrize("name", [run_folder.METRICS, run_folder.TRACE, run_folder.MODEL])
def test_what_a_run_has_left_is_refused_in_one_line_if_it_is_damaged(
    copy: Callable[[bool], Path], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy(True)
    run_folder.write_config(folder, {})
    run = paceline.simulate("quadratic", "asp", workers=2, servers=1, iterations=3)
    run_folder.save(folder, run)
    assert cli.run(["report", str(folder)]) == 0
    (folder / name).write_bytes(b'{"history": 5}\n')
    commands = [["report", str(folder)], ["replay", str(folder)]]
    for command in commands[: 1 + (name == run_folder.MODEL)]:
        capfd.readouterr()
        assert cli.run(command) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "cannot be read" in line
    (folder / name).unlink()
    assert cli.run(["report", str(folder)]) == 2
    assert f"did not end: it has no {name}" in capfd.readouterr().err


def test_what_an_older_version_wrote_is_refused_by_that(copy: Callable[[bool], Path]) -> None:
    folder = copy(False)
    for path in checkpoint.whole(folder / checkpoint.FOLDER):
        (path / checkpoint.MANIFEST).write_bytes(b'{"number":1,"policy":"asp","layout":[],"shards":[],"others":""}')
    with pytest.raises(Damaged, match="was written by an older version of paceline, without checksums"):
        find_start(folder, False, None, print)


def test_a_log_knows_its_end_whichever_slot_is_damaged(tmp_path: Path) -> None:
    log = LogSegment(tmp_path, 0)
    assert update_log.read_end(tmp_path) == BEGINNING
    for _ in range(3):
        log.append(update_log.LoggedHyper(()))
        log.note_end()
    whole = (tmp_path / update_log.END).read_bytes()
    assert update_log.read_end(tmp_path).serial == 3
    known = set()
    for at in range(len(whole)):
        (tmp_path / update_log.END).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        known.add(update_log.read_end(tmp_path).serial)
    assert known == {2, 3}  # at least: what cannot be read of so many is damaged
    (tmp_path / update_log.END).write_bytes(bytes(len(whole)))
    with pytest.raises(Damaged, match="which says how long the log is, is damaged"):
        update_log.read_end(tmp_path)
    log.close()


def test_every_case_is_judged_by_what_is_known_from_outside(copy: Callable[[bool], Path]) -> None:
    """The judge itself: parameters that are not those of their version, with checksums that are right, are WRONG."""
    folder = copy(False)
    path = checkpoint.whole(folder / checkpoint.FOLDER)[-1]
    assert damage.wrong_in(path) == ""
    manifest = checkpoint.read(path)
    values, learned = checkpoint.load_part(path, manifest, ((CUT, NUMEL),))
    values[7] += 1
    entry = checkpoint.write_shard(path, 1, values, learned, manifest.shards[1].iteration, manifest.shards[1].version)
    changed = checkpoint.Manifest(
        manifest.number, manifest.policy, manifest.layout, (manifest.shards[0], entry), manifest.others_sha256,
        manifest.epochs, manifest.assignment,
    )  # fmt: skip
    (path / checkpoint.MANIFEST).write_bytes(with_checksum(changed))
    assert "are not those of version" in damage.wrong_in(path)
