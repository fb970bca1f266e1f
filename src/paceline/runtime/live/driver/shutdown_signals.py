"""Being asked to end. Ctrl-C or SIGTERM once: finish, checkpoint, summary. Twice: stop now.

Where a job is ended, or a service, or a terminal closed, every process of the run is told so; the others leave it to
the driver (`system/process_setup.py`). A launcher may tell the driver as well, so what comes twice within a moment is
one request; but for Ctrl-C, which is a person's.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from typing import Any

from paceline.runtime.live.system.process_setup import ENDING

ONCE_S = 1.0


class ShutdownSignals:
    """True when somebody has asked."""

    def __init__(self) -> None:
        self.count = 0
        self._told_s = -math.inf
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.count > 0

    def ask(self) -> None:
        """Somebody has asked by another way than a signal; the second time changes nothing."""
        self.count = max(self.count, 1)

    def catch(self) -> None:
        """From now on; only the main thread can. What is ignored, as SIGHUP under nohup, stays ignored."""
        if threading.current_thread() is threading.main_thread():
            caught = [signal.SIGINT, *(number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN)]
            self._before = {number: signal.signal(number, self._hear) for number in caught}

    def ignore(self) -> None:
        """While the run is cleared away, which must not stop halfway."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        before_s, self._told_s = self._told_s, time.monotonic()
        if number != signal.SIGINT and self._told_s - before_s < ONCE_S:
            return
        self.count += 1
        if self.count == 2:
            raise KeyboardInterrupt
