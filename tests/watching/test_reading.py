"""A run is read as it is written: in parts, with what is damaged left out, from the middle, and again when resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.trace import encode_records
from paceline.errors import ConfigError
from paceline.watching import driver_records, run_reader
from paceline.watching import snapshot as shown
from paceline.watching.driver_records import Begun, Ended, Logged, Said
from paceline.watching.run_reader import RunReader
from paceline.watching.time_left import time_left
from tests.watching.feeding import simulated


def folder_of(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"script": "train.py"}))
    (tmp_path / "trace").mkdir()
    return tmp_path


def lines_of(role: str, rank: int, until_s: float = 1e9) -> bytes:
    run = simulated("bsp", "steady:compute_s=0.02")
    node = (role, rank)
    return encode_records([each for each in run.trace.records if each.node == node and each.event.at < until_s])


def test_files_are_read_in_parts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    whole = lines_of("server", 0)
    path = folder / "trace" / "server-0.0.trace"
    reader = RunReader(folder)
    reader.goes_on = lambda: True  # type: ignore[method-assign]
    for end in (10, len(whole) // 2, len(whole) // 2 + 3, len(whole)):
        path.write_bytes(whole[:end])
        reader.poll()
    assert reader.watch.gradients == 4 * 40
    assert reader.damaged == 0


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    damage = b'["Record",["server",0],0,["PushArrived",-1],\n\xff\xfe\nnull\n' + b"[" * 5000 + b"\n"
    (folder / "trace" / "server-0.0.trace").write_bytes(damage + lines_of("server", 0))
    (folder / driver_records.NAME).write_bytes(b'{"type":"said"}\n' + driver_records.encode([Said(1.0, "x\x1b[2J")]))
    reader = RunReader(folder)
    reader.poll()
    assert reader.damaged == 5
    assert reader.watch.gradients == 4 * 40
    assert [each.text for each in reader.snapshot().happenings if each.kind == "said"] == ["x\x1b[2J"]


def test_who_comes_late_reads_the_end_and_knows_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "PASSED_OVER", 20_000)
    monkeypatch.setattr(run_reader, "TAIL", 10_000)
    monkeypatch.setattr(run_reader, "AT_ONCE", 4_000)
    folder = folder_of(tmp_path)
    (folder / "trace" / "server-0.0.trace").write_bytes(lines_of("server", 0))
    reader = RunReader(folder)
    reader.goes_on = lambda: True  # type: ignore[method-assign]
    for _ in range(4):
        reader.poll()
    view = reader.snapshot()
    assert view.skipped
    assert 0 < reader.watch.gradients < 4 * 40
    assert [row.rank for row in view.workers] == [0, 1, 2, 3]
    assert reader.damaged == 0


def test_a_run_that_was_resumed_begins_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    begun = Begun(0.0, 0.0, "bsp", 4, 1)
    before = [begun, Logged(1.0, 5, {"loss": 2.0}), Ended(2.0, "interrupted")]
    feed = folder / driver_records.NAME
    feed.write_bytes(driver_records.encode([*before]))
    reader = RunReader(folder)
    reader.poll()
    assert (reader.snapshot().state, reader.snapshot().how) == (shown.ENDED, "interrupted")
    reader.goes_on = lambda: True  # type: ignore[method-assign]
    feed.write_bytes(driver_records.encode([*before, begun, Logged(1.5, 9, {"loss": float("nan")})]))
    reader.poll()
    view = reader.snapshot()
    assert (view.state, view.metrics) == (shown.RUNS, {"loss": [(1.5, None)]})
    late = RunReader(folder)
    late.poll()
    assert late.snapshot().metrics == view.metrics


def test_a_run_whose_driver_was_killed_is_lost(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / driver_records.NAME).write_bytes(driver_records.encode([Begun(0.0, 0.0, "bsp", 4, 1)]))
    reader = RunReader(folder)
    reader.poll()
    assert reader.snapshot().state == shown.LOST


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run's folder"):
        RunReader(tmp_path)


def test_the_time_that_is_left() -> None:
    falling = [(float(at), 100.0 * 0.5**at) for at in range(12)]
    left, _ = time_left(11.0, "loss<=0.01", {"loss": falling}, None, [])
    assert left == pytest.approx(13.29 - 11.0, abs=0.1)
    assert time_left(11.0, "loss<=1.e.0", {"loss": falling}, None, []) == (None, "")
    rising = [(float(at), 0.05 * at) for at in range(12)]
    assert time_left(11.0, "accuracy=0.8", {"accuracy": rising}, None, [])[0] == pytest.approx(5.0, abs=0.1)
    assert time_left(11.0, "loss<=0.01", {"loss": rising}, None, []) == (None, "")
    assert time_left(0.0, None, {}, 100, [(50, 10.0), (90, 1.0)])[0] == 10.0
    assert time_left(0.0, None, {}, 100, [(50, 0.0)]) == (None, "")
