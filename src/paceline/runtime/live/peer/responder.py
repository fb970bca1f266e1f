"""A thread that hears an AD-PSGD peer's neighbours while its script computes, and answers them at once.

Without it a neighbour that has chosen a slow peer would wait until that peer's next step. The thread does what `step`
does while it waits: it takes what has come, tells the machine, and carries out what that orders. Meanwhile averages go
to slots that the model does not use (`peer/peer_parameters.py`).

Machine, sockets and slots belong to one thread at a time, the one that holds the lock. `step` holds it from beginning
to end; this thread holds it for one round of hearing. It sleeps in the kernel until something comes: with neighbours on
this host alone it is not woken otherwise, with others five times a second, for connections that have to be reopened.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

from paceline.runtime.live.messaging.unix_sockets import Link, Waiter

MAINTAIN_S = 0.2
"""How often the connections to neighbours on other hosts are maintained."""


class Responder:
    """The thread, and the lock that it shares with the thread that calls `step`."""

    def __init__(self, hear: Callable[[float], bool], waiter: Waiter, driver: Link) -> None:
        """`hear(0.0)` takes what has come, and returns whether that was anything."""
        self.hear = hear
        self.waiter = waiter
        self.driver = driver
        self.lock = threading.Lock()
        self.turn = threading.Lock()
        """Held by the thread that gets the lock next, so that neither thread overtakes the other for ever."""
        self.failure: BaseException | None = None
        """The error that has ended the thread."""
        self.closing = False
        self.wakeup = -1
        """An eventfd that wakes the thread."""
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; without it the lock is not needed and not used."""
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.thread = threading.Thread(target=self._run, daemon=True, name="paceline responder")
        self.thread.start()

    @property
    def started(self) -> bool:
        """Whether the thread runs."""
        return self.thread is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gives machine, sockets and slots to the calling thread alone. Raises what went wrong in the other one."""
        if self.thread is None:
            yield
            return
        with self._locked():
            self.check()
            yield
        if self.waiter.remote:  # using their sockets may have taken away what would have woken the thread
            self._wake()

    def check(self) -> None:
        """Raises what went wrong in the thread."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Ends the thread; calling it again is harmless."""
        if self.thread is None:
            return
        self.closing = True
        self._wake()
        self.thread.join()
        self.thread = None
        os.close(self.wakeup)

    def _wake(self) -> None:
        os.eventfd_write(self.wakeup, 1)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.turn:
            self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # these are for the script's own thread
        poll = select.poll()
        poll.register(self.waiter.epoll.fileno(), select.POLLIN)
        poll.register(self.wakeup, select.POLLIN)
        try:
            while (rest_s := self._hear()) is not None:
                poll.poll(None if math.isinf(rest_s) else math.ceil(1000 * rest_s))
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wakeup)
        except BaseException as error:  # told to the script at its next step
            self.failure = error

    def _hear(self) -> float | None:
        """Hears once; returns for how long nothing need be heard unless something comes, or None at the end."""
        with self._locked():
            if self.closing or self.driver.gone:
                return None
            if self.hear(0.0):
                return 0.0
            return min(MAINTAIN_S, self.waiter.rest_s()) if self.waiter.remote else math.inf
