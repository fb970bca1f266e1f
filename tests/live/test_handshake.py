"""The handshake of connections with keys: known answers, and what nobody gets who lacks a key."""

from __future__ import annotations

import contextlib
import copy
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.live.messaging import keys
from paceline.runtime.live.messaging.greetings import ANSWER, CALL, KEYED, KeyedAnswer, KeyedCall
from paceline.runtime.live.messaging.handshake import CallerHandshake, HandshakeFailed, ListenerHandshake
from paceline.runtime.live.messaging.key_files import read_key_file
from paceline.runtime.live.messaging.keys import KeyPair, make_keys, public_of
from paceline.runtime.live.messaging.seals import Encryption
from paceline.runtime.live.messaging.tcp_transport import UNIDENTIFIED
from paceline.runtime.live.messaging.transport import HANDSHAKE_S, ConnectionClosed
from tests.live.listeners import Ear, MakeEar

LISTENER, CALLER = make_keys(), make_keys()
LOW_ORDER = (
    bytes(32),
    b"\1" + bytes(31),
    b"\xec" + 30 * b"\xff" + b"\x7f",
)


def pair_of(secret: str) -> KeyPair:
    text = keys.encode(bytes.fromhex(secret))
    return KeyPair(public_of(text), text)


def test_the_handshake_is_noises() -> None:
    """The vector for Noise_IK_25519_AESGCM_SHA256 of the collection that goes with the specification."""
    caller = pair_of("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1")
    listener = pair_of("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893")
    assert keys.decode(listener.public).hex() == "31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"
    ephemerals = [
        X25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
        for secret in (
            "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
            "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
        )
    ]
    ours = CallerHandshake(caller, listener.public, b"John Galt", ephemerals[0])
    theirs = ListenerHandshake(listener, b"John Galt", ephemerals[1])
    call = ours.call(bytes.fromhex("4c756477696720766f6e204d69736573"))
    assert call.hex() == (
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444e417bc55c7a8166c993356c1be41ef67818a292426f30"
        "1556c7f26b21d25ddb097153891a9a956cff47b83e63ad8d701c1342c209cff1ca5ecd43402762ac249e3bd3a4c0a145fe07cb5dae28ea"
        "13a3"
    )
    assert theirs.read_call(call).hex() == "4c756477696720766f6e204d69736573"
    assert keys.encode(theirs.caller) == caller.public
    answer = theirs.answer(bytes.fromhex("4d757272617920526f746862617264"))
    assert answer.hex() == (
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843af2ccf9972e22afc67aeafcd25162f7f98c363b7762e3e"
        "4cb7d272e39f27a5"
    )
    assert ours.read_answer(answer).hex() == "4d757272617920526f746862617264"
    for end in (ours, theirs):
        hashed = "669c8640d9e42a3cda2f232f78597ceefb01daa6e3df81181ccce6fc6b5026bf"
        assert end.transcript.hash.hex() == hashed
        agreed = end.transcript.keys()
        first, second = Encryption(agreed.from_caller), Encryption(agreed.from_listener)
        said = ("462e20412e20486179656b", "4361726c204d656e676572", "4a65616e2d426170746973746520536179")
        senders = (first, second, first)
        assert [seals.seal(bytes.fromhex(each)).hex() for seals, each in zip(senders, said, strict=True)] == [
            "66acfc92e3197de166809e6d4d5d003dcc819a84bc3522ca53c9d9",
            "71f89aa6533a6de70b0826864dd75f60806ee40170c16290189eb3",
            "4795a3423550c8bf00386bd496a3e2c76c10669d2a75ab8f79b5094c5412a25705",
        ]


def test_keys_are_x25519_in_z85() -> None:
    """RFC 7748, section 6.1; the example of ZeroMQ's RFC 32; the key pair of ZeroMQ's manual of CURVE."""
    alice = pair_of("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    assert keys.decode(alice.public).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert keys.encode(bytes.fromhex("864fd26fb559f75b")) == "HelloWorld"
    assert public_of("D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs") == "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
    noise = random.Random(0)
    for _ in range(100):
        key = noise.randbytes(32)
        assert keys.decode(keys.encode(key)) == key


def ends(listener: KeyPair = LISTENER, called: str = LISTENER.public) -> tuple[CallerHandshake, ListenerHandshake]:
    return CallerHandshake(CALLER, called, KEYED), ListenerHandshake(listener, KEYED)


def test_a_listener_without_its_secret_key_learns_nothing() -> None:
    """Not even who calls."""
    caller, listener = ends(listener=make_keys())
    with pytest.raises(HandshakeFailed):
        listener.read_call(caller.call(b"secret"))
    assert listener.caller == b""


def test_a_caller_without_its_secret_key_is_not_answered() -> None:
    caller, listener = CallerHandshake(KeyPair(CALLER.public, make_keys().secret), LISTENER.public, KEYED), ends()[1]
    caller.secret = PublicOf(caller.secret, CALLER)  # type: ignore[assignment]
    with pytest.raises(HandshakeFailed):
        listener.read_call(caller.call())


class PublicOf:
    """A secret key that claims to belong to another's public key."""

    def __init__(self, secret: X25519PrivateKey, claimed: KeyPair) -> None:
        self.exchange = secret.exchange
        self.claimed = X25519PrivateKey.from_private_bytes(keys.decode(claimed.secret))

    def public_key(self) -> X25519PublicKey:
        return self.claimed.public_key()


def test_both_ends_agree_on_keys_that_nobody_else_and_no_other_connection_has() -> None:
    found = set()
    for _ in range(3):
        caller, listener = ends()
        listener.read_call(caller.call())
        caller.read_answer(listener.answer())
        agreed = caller.transcript.keys()
        assert agreed == listener.transcript.keys()
        found |= {agreed.from_caller, agreed.from_listener}
    assert len(found) == 6, "each direction of each connection has keys of its own"


def test_another_prologue_is_another_handshake() -> None:
    caller, _ = ends()
    with pytest.raises(HandshakeFailed):
        ListenerHandshake(LISTENER, b"another version").read_call(caller.call())


def test_no_end_takes_the_others_part() -> None:
    caller, listener = ends()
    call = caller.call()
    with pytest.raises(HandshakeFailed):
        ends()[0].read_answer(call[:49])
    listener.read_call(call)
    answer = listener.answer(b"1")
    with pytest.raises(HandshakeFailed):
        ends()[1].read_call(answer + bytes(47))
    with pytest.raises(HandshakeFailed):
        ends()[0].read_answer(answer)  # it is the answer to somebody else
    greeting = KeyedAnswer(LISTENER, lambda key: True)
    assert greeting.read(KEYED + call) is not None
    with pytest.raises(ConnectionClosed):
        KeyedCall(CALLER, LISTENER.public).read(KEYED + call)


@pytest.mark.parametrize("public", LOW_ORDER, ids=["zero", "one", "minus one"])
def test_an_ephemeral_key_that_shares_the_same_with_everybody_is_none(public: bytes) -> None:
    caller, listener = ends()
    call = caller.call()
    with pytest.raises(HandshakeFailed):
        listener.read_call(public + call[32:])
    _, listener = ends()
    listener.read_call(call)
    with pytest.raises(HandshakeFailed):
        caller.read_answer(public + listener.answer()[32:])


def test_no_flipped_bit_of_a_handshake_is_overlooked() -> None:
    caller, listener = ends()
    call = caller.call()
    for bit in range(8 * len(call)):
        with pytest.raises(HandshakeFailed):
            ends()[1].read_call(flipped(call, bit))
    listener.read_call(call)
    answer = listener.answer(b"1")
    transcript = caller.transcript
    for bit in range(8 * len(answer)):
        caller.transcript = copy.copy(transcript)
        with pytest.raises(HandshakeFailed):
            caller.read_answer(flipped(answer, bit))


def flipped(data: bytes, bit: int) -> bytes:
    spoilt = bytearray(data)
    spoilt[bit // 8] ^= 1 << bit % 8
    return bytes(spoilt)


@given(st.binary(max_size=2 * CALL), st.booleans())
@settings(max_examples=500, deadline=None)
def test_garbage_is_no_greeting(garbage: bytes, begins_well: bool) -> None:
    """It is refused as soon as it is long enough, with nothing but `ConnectionClosed`."""
    data = KEYED + garbage if begins_well else garbage
    for greeting, size in (
        (KeyedAnswer(LISTENER, lambda key: True), CALL),
        (KeyedCall(CALLER, LISTENER.public), ANSWER),
    ):
        try:
            greeted = greeting.read(data)
        except ConnectionClosed:
            assert len(data) >= size or not KEYED.startswith(data[: len(KEYED)])
        else:
            assert greeted is None
            assert len(data) < size


@pytest.fixture
def ear() -> Iterator[Ear]:
    with Ear() as ear:
        yield ear


def dialled(ear: Ear) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", ear.listener.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(10.0)
    return connection


def answered(ear: Ear, connection: socket.socket, size: int) -> bytes:
    """What the listener says, up to so many bytes."""
    said: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(ConnectionResetError):
            while sum(map(len, said)) < size and (more := connection.recv(size)):
                said.append(more)

    reading = threading.Thread(target=read)
    reading.start()
    ear.until(lambda: not reading.is_alive())
    return b"".join(said)


def test_what_was_recorded_opens_nothing_when_it_is_played_again(ear: Ear) -> None:
    """The call is answered, for it is genuine; but nobody is heard, and who has that key keeps his connection."""
    link, line = ear.link(b"1:0"), Recording(ear.listener.port)
    link.address = line.address
    link.reopen()
    ear.until(lambda: ear.listener.connected(b"1:0"))
    link.send(b"a push")
    assert ear.hear(1) == [(b"1:0", b"a push", [])]
    recorded = line.close()
    ear.until(lambda: ear.gone == [b"1:0"])
    link.address = ear.address
    link.reopen()
    assert ear.works(link, b"1:0")
    with dialled(ear) as connection:
        connection.sendall(recorded[:CALL])
        assert len(answered(ear, connection, ANSWER)) == ANSWER
        assert ear.works(link, b"1:0")
        connection.sendall(recorded[CALL:])
        assert answered(ear, connection, 1) == b""
    assert ear.works(link, b"1:0")
    assert ear.heard == []
    assert ear.gone == [b"1:0"]


class Recording:
    """Passes one connection on, and keeps what the caller says."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.acceptor = socket.create_server(("127.0.0.1", 0))
        self.said = b""
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.acceptor.getsockname()[1]}"

    def run(self) -> None:
        self.near, _ = self.acceptor.accept()
        with self.near, socket.create_connection(("127.0.0.1", self.port)) as far:
            while True:
                for source in select.select([self.near, far], [], [])[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    if source is self.near:
                        self.said += data
                    (far if source is self.near else self.near).sendall(data)

    def close(self) -> bytes:
        """Cuts the connection; what the caller has said."""
        self.near.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.acceptor.close()
        return self.said


def test_who_is_let_in_and_proves_nothing_is_nobody(ear: Ear) -> None:
    """And is closed when the handshake has taken too long."""
    keys = make_keys()
    ear.listener.enrol(keys.public, b"1:0")
    with dialled(ear) as connection:
        connection.sendall(KeyedCall(keys, ear.public).first)
        assert len(answered(ear, connection, ANSWER)) == ANSWER
        assert not ear.listener.connected(b"1:0")
        began = time.monotonic()
        assert answered(ear, connection, 1) == b""
        assert time.monotonic() - began < 3 * HANDSHAKE_S
    assert ear.gone == []


def test_a_handshake_that_comes_byte_by_byte_may_not_take_longer(ear: Ear) -> None:
    link, began = ear.met(b"1:0"), time.monotonic()
    call = KeyedCall(make_keys(), ear.public).first
    with dialled(ear) as connection, contextlib.suppress(OSError):
        for byte in call:
            connection.sendall(bytes([byte]))
            assert ear.works(link, b"1:0")
            time.sleep(0.1)
        pytest.fail("it was listened to")
    assert time.monotonic() - began < 3 * HANDSHAKE_S


def test_no_more_than_so_many_may_be_on_their_way_in(make_ear: MakeEar) -> None:
    ear = make_ear()
    link = ear.met(b"1:0")
    with contextlib.ExitStack() as strangers:
        for _ in range(UNIDENTIFIED + 40):
            connection = strangers.enter_context(dialled(ear))
            connection.sendall(KEYED)
            ear.waiter.wait(0.0)
        ear.until(lambda: len(ear.listener.connections.open) <= UNIDENTIFIED + 1)
        assert ear.works(link, b"1:0")


def test_key_files_of_earlier_versions_are_good(tmp_path: Path) -> None:
    """Their keys were made for CURVE."""
    path = tmp_path / "run.key"
    public, secret = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
    server = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    path.write_text(f"# paceline\naddress=tcp://10.0.0.1:7000\nserver={server}\npublic={public}\nsecret={secret}\n")
    path.chmod(0o600)
    assert read_key_file(path).client == KeyPair(public, secret)
