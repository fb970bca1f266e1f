"""A file system that is really full, and a run's folder that is deleted while the run goes on: the model survives."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import policies, run_folder, workloads
from paceline.cluster import load
from paceline.commands.run import Run
from paceline.core.messages import Members, Node
from paceline.core.trace import Trace
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.run import FINISHED
from paceline.runtime.live.driver import finishing
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.storage import checkpoint
from paceline.runtime.live.storage.trace_files import CUT, TraceFile
from paceline.tensors import optimizers
from paceline.workload_training import train


def training(folder: Path, deed: str) -> None:
    """Train a little; worker 0 fills the disk of the run's folder meanwhile, or deletes the folder."""
    model = torch.nn.Linear(500, 200)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    while opt.global_step < 60:
        opt.zero_grad()
        model(torch.ones(1, 500)).mean().backward()
        opt.step()
        if paceline.init().rank:
            continue
        if deed == "fill" and opt.global_step == 50:
            fill(folder)
        if deed == "delete" and opt.global_step == 20:
            gone = folder.rename(folder.with_name("gone"))  # at once: others write into it while it is removed
            shutil.rmtree(gone, ignore_errors=True)
            until = time.monotonic() + 20
            while not (folder / run_folder.LIVE).exists() and time.monotonic() < until:
                time.sleep(0.01)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, but: int = 0) -> None:
    """Leave so many bytes of room, or none: others may write meanwhile."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > but:
            file.write(bytes(4096))


def carry_out(folder: Path, deed: str, **options) -> int:
    """`paceline run`, but workers are forks of this process; its exit code."""
    command = Run(**{"workers": 2, "dir": str(folder), **options})
    script = str(Path(__file__))
    plan = replace(command.plan([script]), starter=function_starter(partial(training, folder, deed)))
    return command.execute(plan, [script], None)


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".part")]


def test_the_model_is_written_first_and_what_has_no_room_is_said(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = paceline.simulate("digits-mlp", "asp", workers=8, servers=1, iterations=60)
    needed = sum(value.nbytes for value in run.model().values())
    assert len(run.trace.to_bytes()) > 2 * needed
    fill(small_disk, needed + 20_000)
    assert run_folder.save(small_disk / "run", run) == small_disk / "run" / run_folder.MODEL
    kept = load_file(small_disk / "run" / run_folder.MODEL)
    assert all(torch.equal(kept[name], value) for name, value in run.model().items())
    assert f"{small_disk / 'run' / run_folder.TRACE} could not be written: No space left on device" in caplog.messages
    assert hidden(small_disk) == []


def test_a_model_that_has_no_room_in_its_folder_is_not_lost(
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = small_disk / "run"
    assert carry_out(folder, "fill") == 1
    (model,) = tmp_path.glob("paceline-model-*/model.safetensors")
    assert f"{folder / run_folder.MODEL} could not be written: " in caplog.text
    assert f"the model is in {model}" in caplog.text
    assert load_file(model)["weight"].shape == (200, 500)
    assert "WARNING: there was no room for the whole trace" in capsys.readouterr().out
    assert hidden(small_disk) == []


def test_a_run_is_finished_when_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before, it is gone on with: `paceline resume` must not find it finished without its trace."""
    run = replace(paceline.simulate("quadratic", "asp", workers=2, servers=1, iterations=3), ended=FINISHED)

    def be_killed(trace: Trace) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trace, "to_bytes", be_killed)
        with pytest.raises(KeyboardInterrupt):
            run_folder.save(tmp_path, run)
    assert (tmp_path / run_folder.MODEL).exists()
    assert run_folder.read_ended(tmp_path) == ""
    run_folder.save(tmp_path, run)
    assert run_folder.read_ended(tmp_path) == FINISHED


def test_what_was_asked_for_and_has_no_room_is_named_and_the_run_is_told(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(small_disk / f"out.{name}") for name in ("json", "chrome")}
    fill(small_disk)
    with pytest.raises(PacelineError, match=r"out.json could not be written: No space.*; .*out.chrome could not be"):
        carry_out(tmp_path / "run", "", **files, report=str(tmp_path / "report.html"))
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'report.html'}\n" in said
    assert f"the run is in {tmp_path / 'run'}; its report" in said
    assert hidden(small_disk) == []


def test_a_trace_without_room_ends_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = next(iter(paceline.simulate("quadratic", "asp", workers=1, servers=1, iterations=1).trace))
    for do in (lambda trace: 0, lambda trace: trace.follow(0)):
        trace = TraceFile(tmp_path / "deleted", Node("server", 1), 1)
        assert do(trace) == 0
        trace.write(record)
        trace.close()
        assert "server-1.1: its trace ends here, the training goes on: No such file" in caplog.text
        assert (tmp_path / CUT).exists()


def test_buffers_that_have_no_room_are_those_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finishing, "keep_buffers", be_full)
    said: list[str] = []
    work = partial(train, workloads.load("quadratic"), optimizers.parse("sgd:lr=0.1"), 1, 5, 0)
    plan = RunPlan(
        Members(2, 1), function_starter(work), policies.parse("asp"), checkpointing=CheckpointOptions(tmp_path)
    )
    run = Driver(plan, say=said.append).run()
    assert run.failures == []
    assert any(line.startswith("WARNING: the checkpoint at the end has buffers as they were") for line in said)
    assert min(shard.version for shard in checkpoint.latest(tmp_path / checkpoint.FOLDER)[1].shards) == 10


def test_checkpoints_that_have_no_room_leave_the_last_good_one(small_disk: Path) -> None:
    said: list[str] = []
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse("sgd:lr=0.1"), 32, 120, 0)
    plan = RunPlan(
        Members(2, 2), function_starter(work), policies.parse("bsp"), load("steady:compute_s=0.002"),
        care=FaultPolicy(timeout_s=90), checkpointing=CheckpointOptions(small_disk / "run", every_updates=10),
    )  # fmt: skip
    driver = Driver(plan, say=said.append)
    turn, full = driver.turn, []

    def turn_and_fill() -> None:
        turn()
        if not full and driver.parts.checkpointer is not None and driver.parts.checkpointer.last is not None:
            full.append(driver.parts.checkpointer.last)
            fill(small_disk)

    driver.turn = turn_and_fill
    run = driver.run()
    assert run.history[-1].updates == 120
    assert any(line.startswith("WARNING: ") and "checkpoint" in line and "training goes on" in line for line in said)
    assert hidden(small_disk) == []
    path, manifest = checkpoint.latest(small_disk / "run" / checkpoint.FOLDER)
    assert manifest.number >= int(full[0].name)
    checkpoint.check(path)


def test_a_part_that_is_written_while_it_is_discarded_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "000001.part"
    part.mkdir()
    late, remove = iter(["shard-0.safetensors", "shard-1.safetensors"]), os.rmdir

    def write_before(*args: object, **named: object) -> None:
        for name in late:
            (part / name).touch()
            break
        remove(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", write_before)
    checkpoint.discard(part)
    assert not part.exists()


@pytest.mark.parametrize(("policy", "durable"), [("bsp", False), ("bsp", True), ("hop:graph=complete", False)])
def test_a_folder_that_is_deleted_is_made_again_and_gets_the_model(
    tmp_path: Path, policy: str, durable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    servers = None if policy.startswith("hop") else 2
    assert carry_out(folder, "delete", servers=servers, durable=durable, policy=policy) == 0
    said = capsys.readouterr().out
    assert "nothing was trained" not in said
    assert f"WARNING: {folder} was deleted or moved while the run goes on" in said
    assert ("NOT durable" in said) == durable
    assert load_file(folder / run_folder.MODEL)["weight"].shape == (200, 500)
    assert (folder / run_folder.CONFIG).exists()
    manifest = checkpoint.latest(folder / checkpoint.FOLDER)[1]
    assert {shard.iteration for shard in manifest.shards} == {60}
