"""Shared memory: what is removed, what is not, and what happens when it is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import cli, run_folder
from paceline.core.events import ViewChanged
from paceline.core.messages import Node, View
from paceline.core.trace import Record
from paceline.errors import PacelineError
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.trace_files import FEW, HELD, TraceFile, tracing
from paceline.runtime.live.trainer.model_description import leave_buffers
from paceline.tensors.layout import Entry, Layout

LAYOUT = Layout((Entry("p", (1000,), 0),), "float32")


def test_two_processes_see_the_same_values() -> None:
    folder = shared_memory.RunFolder()
    values = shared_memory.create(folder.path / "segment", LAYOUT)
    values.zero_()
    pid = os.fork()
    if pid == 0:
        shared_memory.attach(folder.path / "segment", LAYOUT).fill_(7.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert torch.equal(values, torch.full((1000,), 7.0))
    folder.remove()
    assert not folder.path.exists()


def test_a_killed_drivers_folder_is_removed_and_a_live_ones_is_not() -> None:
    hold = (
        "import time; from paceline.runtime.live.storage import shared_memory;"
        "folder = shared_memory.RunFolder(); print(folder.path, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    path = Path(driver.stdout.readline().strip())
    assert path not in shared_memory.remove_stale()
    assert path.exists()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert path in shared_memory.remove_stale()
    assert not path.exists()


def test_starting_and_cleaning_at_the_same_time() -> None:
    """Eight processes make, clean up and remove folders; none is taken away under its owner."""
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for _ in range(100):
                    folder = shared_memory.RunFolder()
                    shared_memory.remove_stale()
                    assert (folder.path / "lock").exists()
                    folder.remove()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8


def test_no_room_is_one_clear_line() -> None:
    folder = shared_memory.RunFolder()
    huge = Layout((Entry("p", (1 << 46,), 0),), "float32")
    with pytest.raises(PacelineError, match=r"no room for .* MB of shared memory"):
        shared_memory.create(folder.path / "segment", huge)
    assert not (folder.path / "segment").exists()
    folder.remove()


def test_a_segment_of_the_wrong_size_is_refused() -> None:
    folder = shared_memory.RunFolder()
    shared_memory.create(folder.path / "segment", LAYOUT)
    with pytest.raises(PacelineError, match="4000 bytes, the layout needs 8000"):
        shared_memory.attach(folder.path / "segment", Layout((Entry("p", (2000,), 0),), "float32"))
    folder.remove()


def test_what_a_killed_process_had_kept_back_is_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceFile(tmp_path, Node("worker", 3), 0)
    record = Record(Node("worker", 3), 0, ViewChanged(0.0, View(1, ())), ())
    now = [1000.0]
    monkeypatch.setattr("paceline.runtime.live.storage.trace_files.time.monotonic", lambda: now[0])
    sizes = []
    for later_s in (0.0, *[0.01] * (FEW + 3), 1.0):
        now[0] += later_s
        trace.write(record)
        sizes.append(trace.path.stat().st_size // sizes[0] if sizes else trace.path.stat().st_size)
    few, many = list(range(2, FEW + 2)), FEW + 5
    assert sizes[1:] == [*few, *[FEW + 1] * 3, many], "the first few at once, the others now and then"
    trace.close()


def test_a_trace_that_finds_no_room_ends_and_says_so_once(tmp_path: Path, capfd) -> None:
    trace = TraceFile(tmp_path, Node("worker", 3), 0)
    trace.file.close()
    trace.file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    event = ViewChanged(0.0, View(1, ()))
    for _ in range(2 * HELD + 1):
        trace.write(Record(Node("worker", 3), 0, event, ()))
    trace.close()
    assert capfd.readouterr().err.splitlines() == [
        "worker-3.0: its trace ends here, the training goes on: No space left on device"
    ]


def test_traces_lie_on_the_disk_while_a_run_that_leaves_a_folder_goes_on(tmp_path: Path) -> None:
    shared, kept = tmp_path / "shared", tmp_path / "kept"
    for folder in (shared, kept / "trace"):
        folder.mkdir(parents=True)
    (kept / "trace" / "of-a-killed-driver.trace").write_text("")
    with tracing(shared, kept) as output:
        (output / "mine.trace").write_text("")
        assert [path.name for path in (kept / "trace").iterdir()] == ["mine.trace"]
    assert not (kept / "trace").exists()


@pytest.mark.parametrize("kept", [None, Path("/proc/nowhere")], ids=["none", "one that cannot be written"])
def test_without_a_folder_they_lie_in_memory(kept: Path | None, tmp_path: Path) -> None:
    with tracing(tmp_path, kept) as output:
        assert output == tmp_path / "trace"
        assert output.is_dir()
        assert not output.is_symlink()


def test_without_room_for_its_buffers_a_worker_leaves_all_the_same(tmp_path: Path, capfd) -> None:
    leave_buffers({"mean": torch.ones(2)}, tmp_path / "nowhere", 3, 0)
    leave_buffers({"mean": torch.ones(2)}, tmp_path, 3, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["buffers-3.0"]
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("worker 3: its buffers do not count at the end: ")


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path, capsys) -> None:
    folder = shared_memory.RunFolder()
    run_folder.write_config(tmp_path, {"script": "train.py", "arguments": []})
    run_folder.write_live(tmp_path, folder.path)
    assert shared_memory.is_in_use(folder.path)
    assert cli.run(["resume", str(tmp_path)]) == 2
    assert "is going on: end it first, or wait for its end" in capsys.readouterr().err
    folder.remove()
    assert not shared_memory.is_in_use(folder.path)
    assert cli.run(["resume", str(tmp_path)]) != 0
    assert "is going on" not in capsys.readouterr().err


SCRIPT = """
import torch, paceline

paceline.init()
parameter = torch.nn.Parameter(torch.zeros(500_000))
opt = paceline.Optimizer(torch.optim.SGD([parameter], lr=0.1))
for _ in range(3):
    parameter.grad = torch.ones_like(parameter)
    opt.step()
"""
MAY_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not MAY_MOUNT, reason="needs the right to mount a small /dev/shm")
@pytest.mark.parametrize(("megabytes", "code"), [(1, 1), (8, 0)])
def test_a_full_dev_shm_stops_a_run_before_it_begins_or_not_at_all(megabytes: int, code: int, tmp_path: Path) -> None:
    """Two segments and the whole model are 6 MB: what is enough at the beginning is enough at the end."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = f"{sys.executable} -m paceline run --workers 2 --servers 1 --policy bsp train.py"
    script = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && {run}; code=$?; ls -A /dev/shm; exit $code"
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    assert "paceline-" not in done.stdout
    if code:
        assert "no room for 2.0 MB of shared memory in /dev/shm" in done.stderr
        assert "Traceback" not in done.stderr
