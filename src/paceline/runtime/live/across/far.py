"""Messages between hosts, over TCP: listeners and links, as `sockets.py` has them within one.

A message is a header and any number of raw frames of at most `FRAME` bytes behind it, all of it or nothing. With keys
(CURVE, `zeromq.py`) everything is encrypted, a listener lets in nobody whose key was not enrolled, and who speaks is
what the key was enrolled as; a name in a message is never believed. Without keys (`plain.py`) whoever reaches the port
is believed.

A connection is never mended behind the caller's back: a link whose connection broke is `gone` until it is reopened, for
nobody can tell what of it arrived. Before it stood there is nothing to lose: a link that finds nobody, or that is
refused, tries again by itself for as long as somebody waits for it.

A host that is gone is noticed within three seconds; a program that hangs is not noticed at all.

A forked child must not touch what its parent made here, not even to close it. It holds the parent's connections too:
if the parent is killed and the child lives, the other ends see it by the heartbeats only, without keys not at all (the
driver does), and the port stays taken.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.runtime.live.across.callers import Callers
from paceline.runtime.live.across.line import Landing
from paceline.runtime.live.across.plain import plain_post
from paceline.runtime.live.across.posting import FRAME, HANDSHAKE_S, HELLO, Happening, Post, Taken, wrapped
from paceline.runtime.live.across.zeromq import KeyedPost, KeyPair, make_keys

if TYPE_CHECKING:
    from paceline.runtime.live.across.posting import Part

__all__ = ["FRAME", "FarLink", "FarListener", "KeyPair", "make_keys"]

LARGEST = 1 << 32
"""Bytes of the largest message, frames and all, unless a listener is told otherwise."""
ANSWER = 1 << 40
"""Bytes of the largest message that a link takes of its listener."""
QUEUE = 64
"""Messages that may wait for one process at each end, unless said otherwise; 0 for any number."""
BETWEEN = 32
"""Messages taken before those who knock are looked after again."""
BACK_OFF_S = (0.1, 1.0)
"""Between two attempts of a link to get in: the first pause and the longest."""
ATTEMPT_S = 3 * HANDSHAKE_S
"""After this an attempt of which nothing is heard is given up."""
LINGER_MS = 1000
"""How long what was said last may take to leave, when a connection is closed."""


class FarListener:
    """Accepts any number of named processes on one port. It hears them, and lets them in, while somebody waits for it.

    `ports` are the first and the last that may be used; (0, 0) leaves it to the system. A process for which more than
    `hwm` messages wait is cut off. With `aside`, messages come and leave while nobody waits, too; with keys they always
    do.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int],
        keys: KeyPair | None,
        largest: int = LARGEST,
        hwm: int = QUEUE,
        aside: bool = False,
    ) -> None:
        self.keys = keys
        self.largest = largest
        self.callers = Callers()
        self.inbox: deque[tuple[bytes, bytes, list[memoryview]]] = deque()
        self.ended: list[bytes] = []
        self.news = False
        """Somebody is gone, and the waiter does not know."""
        self.taken = 0
        self.warned: set[bytes] = set()
        self.post: Post = plain_post(largest, hwm, None, aside) if keys is None else KeyedPost(keys, largest, hwm)
        try:
            self.port = self.post.listen(host, ports)
        except PacelineError:
            self.close()
            raise

    def enrol(self, public: str, name: bytes) -> None:
        """Whoever has this key is this process, and nobody else is."""
        self.callers.enrol(public, name)

    def expel(self, name: bytes) -> None:
        """Forget its key and end its connection."""
        self.callers.expel(name)

    def connected(self, name: bytes) -> bool:
        return name in self.callers.named

    def gone(self) -> list[bytes]:
        """Whose connection ended since this was last asked, all that came over it having been received.

        Some may be back by now (`connected`).
        """
        ended, self.ended = self.ended, []
        return ended

    def receive(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next (name, message, frames)."""
        if self.inbox:
            return self.inbox.popleft()
        self.taken += 1
        if self.taken % BETWEEN == 0:
            self._look_after()
        return self._take()

    def send(self, name: bytes, message: bytes, frames: Sequence[Part] = (), passing: bool = False) -> bool:
        """False if that process is not connected.

        What is in `frames` must not change before it has arrived, unless it is `passing`.
        """
        caller = self.callers.named.get(name)
        if caller is None:
            return False
        if self.post.send(caller.route, wrapped(message, frames), passing):
            return True
        self.callers.hang_up(name)
        self.callers.ending.append(name)
        return False

    def fileno(self) -> int:
        """Readable when something may have come; before waiting for it, ask `ready`."""
        return self.post.epoll.fileno()

    def ready(self) -> bool:
        """Take in what has come; whether there is a message, or somebody is gone who was not before."""
        self._look_after()
        if not self.inbox and (message := self._take()) is not None:
            self.inbox.append(message)
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return self.post.rest_s()

    def close(self) -> None:
        """What was said last leaves, within a second. If it is much, wait for an answer before: it may not arrive."""
        self.post.close(LINGER_MS)

    def _look_after(self) -> None:
        """Those who ask to be let in, and those who are gone."""
        self.post.admit(self.callers.names.__contains__)
        for happening, descriptor, _ in self.post.happened():
            if happening is Happening.BEGUN:
                self.callers.begun(descriptor)
            else:
                self.callers.over(descriptor)

    def _take(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next message of somebody who has a name."""
        while (taken := self.post.take()) is not None:
            name = self._name(taken)
            if name is None:
                continue
            if taken.is_hello or not self.callers.is_on(name, taken.route):
                self._look_after()  # the end of a descriptor's last connection is not to be taken for this one's
                self.callers.meet(name, taken.route, taken.descriptor)
            message = taken.opened()
            if message is not None:
                return (name, *message)
            if not taken.whole and name not in self.warned:
                self.warned.add(name)
                who = name.decode(errors="replace")
                print(f"paceline: {who} sent more than {self.largest} bytes at once: not read", file=sys.stderr)
        if self.callers.ending:
            self.ended += self.callers.ending
            self.callers.ending.clear()
            self.news = True
        return None

    def _name(self, taken: Taken) -> bytes | None:
        if self.keys is not None:
            return self.callers.names.get(taken.key)
        return taken.route


class FarLink:
    """A connection to a far listener, under a name of one's own: with keys, the one its key was enrolled as.

    With `aside`, messages come and leave while nobody waits, too; with keys they always do. Without keys, frames may be
    read straight to where `landing` says.
    """

    def __init__(
        self,
        address: str,
        name: bytes,
        keys: KeyPair | None,
        server_key: str,
        hwm: int = QUEUE,
        landing: Landing | None = None,
        aside: bool = False,
    ) -> None:
        self.address = address
        self.name = name
        self.server_key = server_key
        self.post: Post = plain_post(ANSWER, hwm, landing, aside) if keys is None else KeyedPost(keys, ANSWER, hwm)
        self.refused = ""
        """Why the last attempt to get in came to nothing, if it did."""
        self.gone = False
        """The connection broke after it stood: what was under way may be lost. `reopen`, and say it again."""
        self.stands = False
        self.ending = False
        """It broke; what came over it may still be to be read."""
        self.news = False
        """It is gone, and the waiter does not know."""
        self.outbox: deque[Sequence[Part]] = deque()
        self.inbox: deque[tuple[bytes, list[memoryview]]] = deque()
        self.back_off_s = BACK_OFF_S[0]
        self.again_at = math.inf
        """When to try again."""
        self.reopen()

    def reopen(self) -> None:
        """Connect anew. What has not left yet never will."""
        self.outbox.clear()
        self.outbox.append(HELLO)
        self.inbox.clear()
        self.gone = False
        self.refused = ""
        self.back_off_s = BACK_OFF_S[0]
        self._call()

    def send(self, message: bytes, frames: Sequence[Part] = ()) -> None:
        """What is in `frames` must not change before it has arrived. What is sent while it is `gone` is lost."""
        if not self.gone:
            self.outbox.append(wrapped(message, frames))
            self._look_after()

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none right now."""
        self._take()
        return self.inbox.popleft() if self.inbox else None

    def wait_for(self, timeout_s: float) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none within the time, or it is gone."""
        until = time.monotonic() + timeout_s
        while (message := self.receive()) is None and not self.gone:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self.post.wait(min(left_s, self.rest_s()))
        return message

    def fileno(self) -> int:
        """Readable when something may have come; before waiting for it, ask `ready`."""
        return self.post.epoll.fileno()

    def ready(self) -> bool:
        """Take in what has come; whether there is a message, or it is gone and was not before."""
        self._take()
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return min(self.post.rest_s(), max(0.0, self.again_at - time.monotonic()))

    def close(self) -> None:
        """What was said last leaves, within a second. If it is much, wait for an answer before: it may not arrive."""
        self.again_at = math.inf
        self.post.close(LINGER_MS if self.stands else 0)

    def _take(self) -> None:
        """See that there is a message in the inbox, if there is one at all."""
        self._look_after()
        if self.inbox:
            return
        taken = self.post.take()
        message = None if taken is None else taken.opened()
        if message is not None:
            self.inbox.append(message)
        elif taken is None and self.ending:
            self.ending = self.stands = False
            self.gone = self.news = True
            self.post.shut(0)

    def _call(self) -> None:
        self.stands = self.ending = False
        self.again_at = time.monotonic() + ATTEMPT_S
        self.post.call(self.address, self.name, self.server_key)

    def _look_after(self) -> None:
        """The connection, whether it stands or not, and what is to leave."""
        for happening, _, reason in self.post.happened():
            if happening is Happening.STANDS:
                self.stands = True
                self.refused = ""
                self.again_at = math.inf
            elif self.stands:
                self.ending = True
            elif self.again_at > time.monotonic() + BACK_OFF_S[1]:  # of one attempt the first reason counts
                self.refused = f"{self.address} {reason}"
                self.again_at = time.monotonic() + self.back_off_s
                self.back_off_s = min(2 * self.back_off_s, BACK_OFF_S[1])
        if not self.stands and time.monotonic() >= self.again_at:
            self._call()
        while self.stands and self.outbox and self.post.send(b"", self.outbox[0]):
            self.outbox.popleft()
