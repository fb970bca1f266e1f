"""The page in a real browser: it shows a live run, survives the driver, lets nothing in, and bears a thousand workers.

Pictures are left in the folder that the environment variable SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.commands.page import start_page
from paceline.core.trace import encode_records
from paceline.watching import driver_records
from paceline.watching.driver_records import Begun, DriverRecord, Logged, Said
from tests.watching.browser import Browser, needs_browser, open_browser
from tests.watching.feeding import simulated
from tests.watching.live_page import run_with_page, until

pytestmark = [pytest.mark.ci, needs_browser]
SCRIPTS = ("<script>window.owned = 1</script>", "<img src=x onerror='window.owned = 1'>")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path / "profile") as opened:
        yield opened


def picture(browser: Browser, name: str) -> None:
    """Looks at the page in both widths: nothing is wider than the window."""
    for width in (1400, 400):
        browser.resize(width, 1500)
        frames = browser.js("dispatchEvent(new Event('resize')); return paceline.frames")
        browser.until(lambda before=frames: browser.js("return paceline.frames") > before)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("SCREENSHOTS"):
            browser.driver.save_screenshot(str(Path(folder) / f"{name}-{width}.png"))
    browser.resize(1400, 1500)


def test_a_live_run(tmp_path: Path, browser: Browser) -> None:
    with run_with_page(tmp_path, "--workers", "4", "--servers", "2", "--restarts", "1") as page:
        address = page.address("with controls")
        browser.driver.get(address)
        assert browser.driver.current_url == address.partition("?")[0]
        assert browser.js("return document.cookie") == ""
        browser.until(lambda: browser.text("#state") == "runs")
        # Slow is who has been for a few steps: from then on it is told within 2 s.
        browser.until(lambda: "worker 2 slows the run down" in browser.text("#findings"))
        since_s = float(browser.text("#findings .saying").split("since ")[1].split(" s")[0])
        assert browser.js("return paceline.time_s") - since_s < 2.0 + 6 * 0.1
        picture(browser, "live")

        os.kill(page.pid_of(3), signal.SIGKILL)
        browser.until(lambda: "worker 3 was killed" in browser.text("#happenings"))
        browser.until(lambda: "worker 3 takes part" in browser.text("#happenings"))
        browser.js("document.getElementById('count').value = 1; document.querySelector('#resize button').click()")
        browser.until(lambda: "1 server instead of 2" in browser.text("#said"))
        browser.until(lambda: "1 server" in browser.text("#facts"))

        page.program.kill()
        browser.until(lambda: browser.text("#state") == "lost")
        picture(browser, "lost")
        assert browser.complaints() == []


class Feed:
    """A run that goes on as far as others can see: its files grow, and its lock is held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        (folder / "trace").mkdir(parents=True)
        self.shared.mkdir()
        self.lock = (self.shared / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (folder / "config.json").write_text("{}")
        (folder / "live.json").write_text(json.dumps({"folder": str(self.shared)}))

    def tell(self, *records: DriverRecord) -> None:
        with (self.folder / driver_records.NAME).open("ab") as file:
            file.write(driver_records.encode(list(records)))


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    feed = Feed(tmp_path / "run")
    yield feed
    feed.lock.close()
    (feed.folder / "config.json").unlink()
    feed.folder.rename(tmp_path / "gone")  # without its folder the page ends


def test_what_others_have_named_is_text(feed: Feed, browser: Browser) -> None:
    feed.tell(Begun(0.0, time.monotonic(), SCRIPTS[0], 2, 1, target=SCRIPTS[1]))
    feed.tell(*(Logged(1.0, 1, {name: 1.0}) for name in SCRIPTS), *(Said(1.0, text) for text in SCRIPTS))
    lines = start_page(feed.folder)
    browser.driver.get(lines[0].split()[-1])
    browser.until(lambda: SCRIPTS[0] in browser.text("#happenings"))
    assert SCRIPTS[1] in browser.text("#charts")
    assert SCRIPTS[0] in browser.text("#facts")
    assert browser.js("return window.owned") is None
    assert browser.js("return document.querySelectorAll('main script, main img').length") == 0
    refused = "return fetch('/').then(r => r.status)"
    assert browser.js(refused) == 200
    browser.js(
        "const s = document.createElement('script'); s.textContent = 'window.owned = 1'; document.body.append(s)"
    )
    assert browser.js("return window.owned") is None
    assert any("Content Security Policy" in each for each in browser.complaints())
    browser.driver.delete_all_cookies()
    assert browser.js(refused) == 403


def test_a_thousand_workers_are_drawn_within_100_ms(feed: Feed, browser: Browser) -> None:
    speeds = ":".join("4" if rank == 7 else "1" for rank in range(1000))
    run = simulated("ssp:staleness=3", f"factors:by_worker={speeds},compute_s=0.5", workers=1000, iterations=14)
    records = sorted(run.trace.records, key=lambda record: record.event.at)
    over = threading.Event()
    began_s = time.monotonic()
    feed.tell(Begun(0.0, began_s, run.policy, 1000, 2, run.trace.header.slice_bytes))

    def write() -> None:
        done = 0
        with (feed.folder / "trace" / "all-0.0.trace").open("ab", buffering=0) as file:
            while done < len(records) and not over.wait(0.2):
                until_s, before = time.monotonic() - began_s, done
                while done < len(records) and records[done].event.at <= until_s:
                    done += 1
                file.write(encode_records(records[before:done]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        browser.driver.get(start_page(feed.folder)[0].split()[-1])
        browser.until(lambda: browser.js("return (document.querySelectorAll('#workers tbody tr').length)") == 48)
        browser.until(lambda: "worker 7 slows the run down" in browser.text("#findings"))
        picture(browser, "thousand")
        browser.js("paceline.frames = 0; paceline.longest_ms = 0")
        browser.until(lambda: browser.js("return paceline.frames") >= 6)
        longest_ms = browser.js("return paceline.longest_ms")
        if folder := os.environ.get("SCREENSHOTS"):
            (Path(folder) / "thousand.txt").write_text(f"longest frame of a thousand workers: {longest_ms:.1f} ms\n")
        assert longest_ms < 100
    finally:
        over.set()
        writer.join()
    until(lambda: not writer.is_alive())
