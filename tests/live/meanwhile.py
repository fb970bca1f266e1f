"""What a test does beside a live run, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.run import Run
from paceline.runtime.live.driver.driver import Driver


def meanwhile(driver: Driver, deed: Callable[[], object], points: int = 20) -> Run:
    """Runs, and does `deed` once so many points were logged; an error in it ends the run and fails the test."""
    errors: list[BaseException] = []

    def wait_and_do() -> None:
        try:
            while len(driver.parts.logged.history) < points:
                time.sleep(0.001)
            deed()
        except BaseException as error:
            errors.append(error)
            driver.parts.interrupts.count = 1

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    try:
        return driver.run()
    finally:
        thread.join()
        assert not errors
