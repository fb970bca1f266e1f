"""Messages between hosts, over TCP: sizes, names, keys, and connections that end and come back."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from paceline.errors import PacelineError
from paceline.runtime.live.messaging.greetings import OPEN
from paceline.runtime.live.messaging.remote_links import FRAME, KeyPair, RemoteLink, RemoteListener, make_keys
from paceline.runtime.live.messaging.tcp_connection import TcpConnection
from paceline.runtime.live.messaging.tcp_framing import advance
from paceline.runtime.live.messaging.tcp_transport import TcpTransport
from paceline.runtime.live.messaging.unix_sockets import Waiter
from tests.live.conftest import sockets, threads
from tests.live.listeners import Ear, MakeEar, cut_up, on_the_line


@pytest.fixture(
    params=[(True, False), (False, False), (True, True), (False, True)],
    ids=["keys", "plain", "threaded-keys", "threaded"],
)
def ear(request: pytest.FixtureRequest) -> Iterator[Ear]:
    secure, threaded = request.param
    with Ear(secure, threaded=threaded) as ear:
        yield ear


@pytest.fixture
def keyed() -> Iterator[Ear]:
    with Ear() as ear:
        yield ear


both = pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])


def test_messages_and_frames_arrive_as_they_were_whatever_their_size(ear: Ear) -> None:
    link = ear.met(b"3:1")
    noise = random.Random(0).randbytes(FRAME)
    sizes = [(1, []), (100, [0, 1, 70_000]), (0, [5]), (FRAME, [FRAME]), (FRAME + 1, []), (3 * FRAME, [7, 0])]
    for header, frames in sizes:
        link.send((3 * noise)[:header], [memoryview(noise)[:size] for size in frames])
    for (header, frames), (name, message, got) in zip(sizes, ear.hear(len(sizes)), strict=True):
        assert name == b"3:1"
        assert message == (3 * noise)[:header]
        assert [bytes(frame) for frame in got] == [noise[:size] for size in frames]
    assert ear.listener.send(b"3:1", b"one")
    assert ear.listener.send(b"3:1", b"two", [noise])
    assert link.wait_for(10.0) == (b"one", [])
    message, frames = link.wait_for(10.0) or (b"", [])
    assert (message, [bytes(frame) for frame in frames]) == (b"two", [noise])
    assert link.receive() is None


def test_forty_megabytes_there_and_back(ear: Ear) -> None:
    link = ear.met(b"3:1")
    data = random.Random(0).randbytes(40_000_000)
    link.send(b"push", cut_up(data, FRAME))
    [(_, message, frames)] = ear.hear(1)
    assert message == b"push"
    assert b"".join(frames) == data
    assert ear.listener.send(b"3:1", b"parameters", frames)
    ear.until(lambda: link.inbox)
    message, frames = link.wait_for(10.0) or (b"", [])
    assert message == b"parameters"
    assert b"".join(frames) == data


def test_parts_may_lie_in_several_places_and_may_change_at_once_if_they_are_passing(ear: Ear) -> None:
    link = ear.met(b"3:1")
    data = bytearray(random.Random(0).randbytes(9 * FRAME))
    expected = bytes(data)
    halves = [memoryview(data)[at : at + FRAME // 2] for at in range(0, len(data), FRAME // 2)]
    link.send(b"push", [tuple(halves[at : at + 2]) for at in range(0, len(halves), 2)])
    [(_, message, frames)] = ear.hear(1)
    assert (message, b"".join(frames), len(frames)) == (b"push", expected, 9)
    for number in range(3):
        assert ear.listener.send(b"3:1", b"%d" % number, cut_up(memoryview(data), FRAME), may_change=True)
        data[:] = bytes([number]) * len(data)
    for number in range(3):
        ear.until(lambda: link.inbox)
        message, frames = link.wait_for(10.0) or (b"", [])
        assert message == b"%d" % number
        assert b"".join(frames) == (bytes([number - 1]) * len(data) if number else expected)


@both
def test_threaded_messages_come_and_leave_while_both_ends_compute(make_ear: MakeEar, secure: bool) -> None:
    ear = make_ear(secure, threaded=True)
    link = ear.met(b"1:0")
    data = bytes(60 * FRAME)  # more than the kernels hold
    link.send(b"push", cut_up(data, FRAME))
    begin = time.monotonic()
    while not ear.listener.transport.transport.inbox:  # nobody waits for anything
        assert time.monotonic() - begin < 10.0
        time.sleep(0.01)
    assert ear.hear(1)[0][1] == b"push"
    for number in range(200):
        link.send(b"%d" % number, [bytes(100_000)])
    time.sleep(0.5)
    assert len(ear.listener.transport.transport.inbox) < 100, "and it does not read without end"
    assert [message for _, message, _ in ear.hear(200)] == [b"%d" % number for number in range(200)]


@both
def test_threaded_what_found_no_room_leaves_as_soon_as_there_is_some(make_ear: MakeEar, secure: bool) -> None:
    ear = make_ear(secure, threaded=True, most_waiting=4)
    link = ear.link(b"1:0", most_waiting=4)
    ear.until(lambda: ear.listener.connected(b"1:0"))
    with ear.listener.transport.lock:  # nobody reads: its thread waits for the lock
        for number in range(60):
            link.send(b"%d" % number, [bytes(FRAME)])
        assert link.outbox
    assert link.wait_for(1.2) is None
    assert not link.outbox
    assert [message for _, message, _ in ear.hear(60)] == [b"%d" % number for number in range(60)]


@both
def test_frames_are_read_to_where_they_belong(make_ear: MakeEar, secure: bool) -> None:
    ear, place = make_ear(secure), bytearray(3 * FRAME)
    asked: list[tuple[bytes, list[int]]] = []

    def land(message: bytes, lengths: Sequence[int]) -> list[memoryview] | None:
        asked.append((message, list(lengths)))
        return cut_up(memoryview(place), FRAME) if message == b"here" else None

    link = ear.link(b"1:0", place_frames=land)
    ear.until(lambda: ear.listener.connected(b"1:0"))
    data = random.Random(0).randbytes(3 * FRAME)
    for word in (b"elsewhere", b"here"):
        assert not any(place)
        assert ear.listener.send(b"1:0", word, cut_up(data, FRAME))
        ear.until(lambda: link.inbox)
        message, frames = link.wait_for(1.0) or (b"", [])
        assert (message, b"".join(frames)) == (word, data)
    assert place == data
    assert asked == [(b"elsewhere", 3 * [FRAME]), (b"here", 3 * [FRAME])]


@pytest.mark.parametrize("cut", [3, 14, 20, 30], ids=["in the count", "in the lengths", "in the message", "after it"])
def test_frames_are_read_to_where_they_belong_however_their_message_comes(cut: int) -> None:
    """Or an answer that came twice could be used from one place while the other is read to where it belongs."""
    place, data = bytearray(FRAME), random.Random(0).randbytes(FRAME)
    said = on_the_line(b"parameters", data)
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        address = f"tcp://127.0.0.1:{acceptor.getsockname()[1]}"
        link = RemoteLink(address, b"1:0", None, "", place_frames=lambda *_: [memoryview(place)])
        with contextlib.closing(link), acceptor.accept()[0] as connection:
            connection.sendall(OPEN)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in (said[:cut], said[cut:]):
                connection.sendall(part)
                message = link.wait_for(0.2)
            assert message is not None
            assert place == data


@both
def test_where_half_a_message_has_left_nothing_more_does(
    make_ear: MakeEar, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel has against the rest: what is said next would be taken for it."""
    ear = make_ear(secure)
    link = ear.met(b"1:0")

    def fail(self: TcpConnection) -> None:
        views = self.outgoing[0].ready
        advance(views, self.socket.send(views[0]))
        raise OSError(errno.ENOBUFS, "no room")

    with monkeypatch.context() as scarce:
        scarce.setattr(TcpConnection, "send_some", fail)
        link.send(b"lost", [bytes(100)])
    link.send(b"lost, too")
    ear.until(lambda: link.gone)
    link.reopen()
    assert ear.works(link, b"1:0")
    assert ear.heard == []


def test_an_end_is_heard_though_a_child_holds_the_connection(make_ear: MakeEar) -> None:
    ear = make_ear(secure=False)
    link = ear.met(b"1:0")
    child = os.fork()
    if not child:
        time.sleep(30.0)
        os._exit(0)
    ear.waiter.forget(link.fileno())
    link.close()
    assert ear.until(lambda: ear.gone == [b"1:0"]) < 2.0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_each_is_answered_by_its_name(ear: Ear) -> None:
    links = {name: ear.met(name) for name in (b"0:0", b"1:0", b"2:0")}
    for name, link in links.items():
        link.send(b"I am " + name)
    assert sorted(message[:2] for message in ear.hear(3)) == [(name, b"I am " + name) for name in links]
    for name in links:
        assert ear.listener.send(name, b"you are " + name)
    assert {name: link.wait_for(10.0) for name, link in links.items()} == {
        name: (b"you are " + name, []) for name in links
    }
    assert not ear.listener.send(b"3:0", b"x")


def test_a_key_that_is_not_enrolled_is_refused(keyed: Ear) -> None:
    good, bad = keyed.met(b"0:0"), keyed.link(b"0:0", enrolled=False)
    bad.send(b"let me in")
    keyed.until(lambda: bad.refused)
    assert bad.refused == f"{keyed.address} does not know this key"
    assert not bad.gone
    assert keyed.works(good, b"0:0")
    assert keyed.heard == []


def test_no_key_is_refused(keyed: Ear) -> None:
    link = RemoteLink(keyed.address, b"0:0", None, "")
    keyed.links.append(link)
    keyed.waiter.watch(link)
    keyed.until(lambda: link.refused)
    assert link.refused.startswith(f"{keyed.address} broke off: it may have another key, or keys where we have none")


@pytest.mark.parametrize("key", [make_keys().public, 40 * "0", ""], ids=["another", "zero", "none"])
def test_a_listener_with_another_key_is_not_spoken_to(keyed: Ear, key: str) -> None:
    link = keyed.link(b"0:0", server_key=key or "00000")
    link.send(b"secret")
    keyed.until(lambda: link.refused)
    assert link.refused.startswith(f"{keyed.address} broke off: it may have another key")
    assert keyed.heard == []


def test_a_key_enrolled_late_gets_in_with_what_it_had_to_say(keyed: Ear) -> None:
    keys = make_keys()
    link = keyed.link(b"4:0", keys, enrolled=False)
    link.send(b"hello")
    keyed.until(lambda: link.refused)
    keyed.listener.enrol(keys.public, b"4:0")
    assert keyed.hear(1) == [(b"4:0", b"hello", [])]
    assert link.refused == ""
    assert keyed.works(link, b"4:0")


def test_a_link_waits_for_a_listener_that_is_not_there_yet(ear: Ear) -> None:
    port = ear.listener.port
    ear.deafen()
    keys = make_keys() if ear.keys else None
    link = RemoteLink(f"tcp://127.0.0.1:{port}", b"0:0", keys, ear.public)
    ear.links.append(link)
    link.send(b"early")
    assert link.wait_for(0.2) is None
    assert link.refused == f"tcp://127.0.0.1:{port} cannot be reached"
    assert not link.gone
    ear.listen(port)
    if keys is not None:
        ear.listener.enrol(keys.public, b"0:0")
    ear.waiter.watch(link)
    assert ear.hear(1) == [(b"0:0", b"early", [])]


def test_what_had_not_left_when_a_link_is_reopened_never_does(ear: Ear) -> None:
    port = ear.listener.port
    ear.deafen()
    keys = make_keys() if ear.keys else None
    link = RemoteLink(f"tcp://127.0.0.1:{port}", b"1:0", keys, ear.public, threaded=ear.threaded)
    ear.links.append(link)
    link.send(b"forget it")
    assert link.wait_for(0.2) is None
    assert link.outbox
    ear.listen(port)
    if keys is not None:
        ear.listener.enrol(keys.public, b"1:0")
    ear.waiter.watch(link)
    link.reopen()
    link.send(b"instead")
    assert ear.hear(1) == [(b"1:0", b"instead", [])]
    assert ear.works(link, b"1:0")


def test_a_name_is_the_keys_whatever_is_said(keyed: Ear) -> None:
    boss, keys = keyed.met(b"boss"), make_keys()
    keyed.listener.enrol(keys.public, b"5:0")
    link = RemoteLink(keyed.address, b"boss", keys, keyed.public)
    keyed.links.append(link)
    keyed.waiter.watch(link)
    assert keyed.works(link, b"5:0")
    assert keyed.works(boss, b"boss")


def test_a_later_key_replaces_the_earlier_one(keyed: Ear) -> None:
    first = keyed.met(b"1:0")
    keys = make_keys()
    keyed.listener.enrol(keys.public, b"1:0")
    first.send(b"too late")
    keyed.until(lambda: first.gone)
    second = keyed.link(b"1:0", keys)
    assert keyed.works(second, b"1:0")
    first.reopen()
    first.send(b"still me?")
    keyed.until(lambda: first.refused)
    assert keyed.works(second, b"1:0")
    assert keyed.heard == []


def test_who_is_expelled_is_cut_off_and_not_let_in_again(keyed: Ear) -> None:
    link, other = keyed.met(b"1:0"), keyed.met(b"2:0")
    keyed.listener.expel(b"1:0")
    assert not keyed.listener.send(b"1:0", b"x")
    assert keyed.until(lambda: link.gone) < 1.0
    link.reopen()
    keyed.until(lambda: link.refused)
    assert keyed.works(other, b"2:0")
    assert keyed.gone == []  # whoever expelled it knows


def test_a_listener_that_is_back_is_reopened_to_and_nothing_is_said_twice(ear: Ear) -> None:
    port, keys = ear.listener.port, make_keys() if ear.keys else None
    link = ear.met(b"1:0", keys)
    assert ear.works(link, b"1:0")
    ear.deafen()
    assert link.wait_for(10.0) is None
    assert link.gone
    link.send(b"lost")
    ear.listen(port)
    if keys is not None:
        ear.listener.enrol(keys.public, b"1:0")
    link.reopen()
    assert not link.gone
    link.send(b"again")
    assert ear.hear(1) == [(b"1:0", b"again", [])]
    assert ear.works(link, b"1:0")


def test_the_last_words_come_before_the_end(ear: Ear) -> None:
    for life in range(20):
        link = ear.met(b"1:0")
        for word in range(10):
            link.send(b"%d" % word)
        ear.waiter.forget(link.fileno())
        link.close()
        heard: list[bytes] = []
        while b"1:0" not in ear.gone:
            ear.waiter.wait(0.05)
            ear.gone += ear.listener.gone()
            if (message := ear.listener.receive()) is not None:
                heard.append(message[1])
        assert heard == [b"%d" % word for word in range(10)], life
        ear.gone.clear()
        assert not ear.listener.connected(b"1:0")


def test_who_comes_again_is_answered_where_it_is_now(ear: Ear) -> None:
    keys = make_keys() if ear.keys else None
    first = ear.met(b"1:0", keys)
    second = ear.link(b"1:0", keys)
    second.send(b"here")
    assert ear.hear(1) == [(b"1:0", b"here", [])]
    ear.until(lambda: first.gone)
    assert ear.gone == [b"1:0"]
    assert ear.listener.connected(b"1:0")
    assert ear.works(second, b"1:0")


def repeat(ear: Ear, keys: KeyPair | None) -> None:
    """Send back what is heard, in a process of one's own."""
    link = RemoteLink(ear.address, b"1:0", keys, ear.public)
    while (message := link.wait_for(60.0)) is not None and message[0] != b"end":
        link.send(*message)
    link.close()


@pytest.fixture
def client(ear: Ear) -> Iterator[int]:
    """The number of a process that repeats what it hears."""
    keys = make_keys() if ear.keys else None
    if keys is not None:
        ear.listener.enrol(keys.public, b"1:0")
    child = os.fork()
    if child == 0:
        try:
            repeat(ear, keys)
        finally:
            os._exit(0)
    try:
        ear.until(lambda: ear.listener.connected(b"1:0"))
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_client_that_is_killed_is_missed_at_once(ear: Ear, client: int) -> None:
    os.kill(client, signal.SIGKILL)
    assert ear.until(lambda: ear.gone == [b"1:0"]) < 0.5
    assert not ear.listener.send(b"1:0", b"x")


def test_nobody_sleeps_through_a_message(ear: Ear, client: int) -> None:
    """Also if something is sent when it comes."""
    sent = back = 0
    longest_s = 0.0
    while back < 3000:
        while sent < min(back + 1 + back % 7, 3000):
            assert ear.listener.send(b"1:0", b"%d" % sent)
            sent += 1
        begin = time.monotonic()
        ear.waiter.wait(5.0)
        longest_s = max(longest_s, time.monotonic() - begin)
        while (message := ear.listener.receive()) is not None:
            assert message[1] == b"%d" % back
            back += 1
    assert longest_s < 4.0


def test_a_child_that_touches_nothing_disturbs_nothing(ear: Ear) -> None:
    link = ear.met(b"1:0")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert ear.works(link, b"1:0")


@both
def test_the_first_free_port_of_a_range_is_used(secure: bool) -> None:
    keys = make_keys() if secure else None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        with contextlib.closing(RemoteListener("127.0.0.1", (first, first + 20), keys)) as listener:
            assert first < listener.port <= first + 20
        with pytest.raises(PacelineError, match=f"^cannot listen on '127.0.0.1': every port from {first} to {first}"):
            RemoteListener("127.0.0.1", (first, first), keys)
    with pytest.raises(PacelineError, match=r"^cannot listen on '192\.0\.2\.1', ports 0 to 0: .+$"):
        RemoteListener("192.0.2.1", (0, 0), keys)
    with pytest.raises(PacelineError, match=r"^cannot listen on 'no\.such\.host\.invalid', ports 0 to 0: .+$"):
        RemoteListener("no.such.host.invalid", (0, 0), keys)


def test_a_waiter_that_has_forgotten_a_listener_does_not_hear_it(make_ear: MakeEar) -> None:
    ear = make_ear(secure=False)
    link = ear.met(b"1:0")
    with contextlib.closing(Waiter()) as waiter:
        waiter.watch(ear.listener)
        waiter.forget(ear.listener.fileno())
        link.send(b"x")
        assert waiter.wait(0.1) == []
        assert ear.hear(1) == [(b"1:0", b"x", [])]


def test_links_and_listeners_that_nobody_closed_end_as_garbage_though_much_was_not_sent() -> None:
    def leave_behind() -> None:
        keys, own = make_keys(), make_keys()
        listener = RemoteListener("127.0.0.1", (0, 0), keys)
        link = RemoteLink(f"tcp://127.0.0.1:{listener.port}", b"1:0", own, keys.public)
        listener.enrol(own.public, b"1:0")
        while not listener.connected(b"1:0"):
            link.ready()
            listener.ready()
        for number in range(60):
            link.send(b"%d" % number, [bytes(FRAME)])
            listener.send(b"1:0", b"%d" % number, [bytes(FRAME)])
        link.itself, listener.itself = link, listener  # type: ignore[attr-defined]

    before = sockets(), threads()
    leave_behind()
    gc.collect()
    until = time.monotonic() + 20.0
    while not (sockets() <= before[0] and threads() <= before[1]):
        assert time.monotonic() < until
        time.sleep(0.05)


@both
@pytest.mark.parametrize("method", ["connect", "listen"])
def test_what_cannot_be_made_whole_leaves_nothing_open(
    method: str, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(TcpTransport, method)

    def fail(*given: object) -> None:
        whole(*given)
        raise RuntimeError("in the midst of it")

    monkeypatch.setattr(TcpTransport, method, fail)
    keys, before = make_keys() if secure else None, sockets()
    if method != "listen":
        with pytest.raises(RuntimeError) as kept:
            RemoteLink("tcp://127.0.0.1:9", b"1:0", keys, keys.public if keys else "")
        assert sockets() <= before, kept
    if method != "connect":
        with pytest.raises(RuntimeError) as kept:
            RemoteListener("127.0.0.1", (0, 0), keys)
        assert sockets() <= before, kept
