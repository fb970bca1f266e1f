"""The page of a live run, without a browser: what it is sent, while workers are killed, come back, and it all ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline import cli
from tests.watching.live_page import run_with_page, until

pytestmark = pytest.mark.ci


def test_a_live_run_is_seen_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run_with_page(tmp_path, "--workers", "4", "--servers", "2", "--restarts", "1") as page:
        views = page.views()
        slow = next(view for view in views if view["findings"])
        assert [found["who"] for found in slow["findings"]] == ["worker 2"]
        assert {row["rank"] for row in slow["workers"]} == {0, 1, 2, 3}
        assert slow["metrics"]["loss"]
        assert slow["waiting_by_worker"][0][0] == 2

        os.kill(page.pid_of(3), signal.SIGKILL)
        gone = next(view for view in views if any("killed" in each["text"] for each in view["happenings"]))
        assert any("worker 3" in each["text"] for each in gone["happenings"])
        back = next(view for view in views if any(row["incarnation"] == 1 for row in view["workers"]))
        assert [row["rank"] for row in back["workers"] if row["incarnation"]] == [3]

        assert page.control("servers", '{"count": 1}')[0] == 200
        assert next(view for view in views if view["servers"] == 1)
        assert page.control("checkpoint") == (200, "a checkpoint is being written")

        assert cli.run(["explain", str(page.folder)]) == 0
        assert "worker 2 slows the run down" in capfd.readouterr().out
        assert cli.run(["top", str(page.folder), "--once"]) == 0
        assert "ssp:staleness=3" in capfd.readouterr().out

        assert page.control("stop")[0] == 200
        until(lambda: page.program.poll() is not None)
        ended = next(view for view in views if view["state"] == "ended")
        assert (ended["how"], ended["findings"][0]["who"]) == ("interrupted", "worker 2")
        address = page.address("page of the run")
        views.close()
        assert next(page.views())["state"] == "ended", f"{address} is there although the driver is not"


def test_a_driver_that_is_killed_leaves_the_page(tmp_path: Path) -> None:
    with run_with_page(tmp_path, "--workers", "3") as page:
        views = page.views()
        next(view for view in views if view["state"] == "runs" and view["gradients"] > 20)
        page.program.kill()
        assert next(view for view in views if view["state"] == "lost")["gradients"] > 20
