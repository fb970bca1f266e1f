"""Shared memory: what is removed, what is not, and what happens when it is full."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import PacelineError
from paceline.runtime.live import memory
from paceline.tensors.layout import Entry, Layout

LAYOUT = Layout((Entry("p", (1000,), 0),), "float32")


def test_two_processes_see_the_same_values() -> None:
    folder = memory.RunFolder()
    values = memory.create(folder.path / "segment", LAYOUT)
    values.zero_()
    pid = os.fork()
    if pid == 0:
        memory.attach(folder.path / "segment", LAYOUT).fill_(7.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert torch.equal(values, torch.full((1000,), 7.0))
    folder.remove()
    assert not folder.path.exists()


def test_a_killed_drivers_folder_is_removed_and_a_live_ones_is_not() -> None:
    hold = (
        "import time; from paceline.runtime.live import memory;"
        "folder = memory.RunFolder(); print(folder.path, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    path = Path(driver.stdout.readline().strip())
    assert path not in memory.remove_stale()
    assert path.exists()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert path in memory.remove_stale()
    assert not path.exists()


def test_a_folder_that_is_just_being_made_is_left_alone() -> None:
    path = memory.base_folder() / f"{memory.PREFIX}test-{os.getpid()}"
    path.mkdir()
    assert path not in memory.remove_stale()
    long_ago = time.time() - 2 * memory.NEW_S
    os.utime(path, (long_ago, long_ago))
    assert path in memory.remove_stale()


def test_no_room_is_one_clear_line() -> None:
    folder = memory.RunFolder()
    huge = Layout((Entry("p", (1 << 46,), 0),), "float32")
    with pytest.raises(PacelineError, match=r"no room for .* MB of shared memory"):
        memory.create(folder.path / "segment", huge)
    assert not (folder.path / "segment").exists()
    folder.remove()


def test_a_segment_of_the_wrong_size_is_refused() -> None:
    folder = memory.RunFolder()
    memory.create(folder.path / "segment", LAYOUT)
    with pytest.raises(PacelineError, match="4000 bytes, the layout needs 8000"):
        memory.attach(folder.path / "segment", Layout((Entry("p", (2000,), 0),), "float32"))
    folder.remove()
