"""The handshake that begins a connection with keys: Noise_IK_25519_AESGCM_SHA256 of the Noise protocol framework.

The caller knows the listener's public key, and sends its own, encrypted, with an ephemeral one. The listener answers
with an ephemeral key. Four secrets that X25519 makes of these keys are mixed into the keys of the connection, one for
each direction: nobody has all four who lacks one of the two secret keys, nor has anybody once the ephemeral keys are
forgotten, though he recorded everything and finds out the secret keys later. What was said is hashed, with the public
keys, and the hash authenticated by each message.

The listener knows that it is not talked to by a recording when the first thing arrives under the connection's keys.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from paceline.runtime.live.messaging import keys
from paceline.runtime.live.messaging.keys import KeyPair

PROTOCOL = b"Noise_IK_25519_AESGCM_SHA256"
KEY = keys.SIZE
TAG = 16
"""Bytes that authenticated encryption adds."""


class HandshakeFailed(Exception):
    """The other end does not have the keys it would need."""


class DirectionKeys(Struct, frozen=True):
    """The keys of a connection."""

    from_caller: bytes
    from_listener: bytes


class Transcript:
    """What was said so far, as a hash, and the secrets that both ends share, as a key."""

    def __init__(self, prologue: bytes, listener: bytes) -> None:
        """Both ends must know the `prologue` and the public key of the listener."""
        self.hash = self.chain = PROTOCOL.ljust(hashlib.sha256().digest_size, b"\0")
        self.cipher: AESGCM | None = None
        self.number = 0
        self.add(prologue)
        self.add(listener)

    def add(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix(self, secret: X25519PrivateKey, public: bytes) -> None:
        """Makes a new key of the old one and what the owners of these two keys share."""
        try:
            shared = secret.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # such a key shares the same with everybody
            raise HandshakeFailed from None
        self.chain, key = derived(self.chain, shared)
        self.cipher, self.number = AESGCM(key), 0

    def encrypt(self, data: bytes) -> bytes:
        assert self.cipher is not None
        encrypted = self.cipher.encrypt(nonce(self.number), data, self.hash)
        self.number += 1
        self.add(encrypted)
        return encrypted

    def decrypt(self, data: bytes) -> bytes:
        assert self.cipher is not None
        try:
            decrypted = self.cipher.decrypt(nonce(self.number), data, self.hash)
        except InvalidTag:
            raise HandshakeFailed from None
        self.number += 1
        self.add(data)
        return decrypted

    def keys(self) -> DirectionKeys:
        return DirectionKeys(*derived(self.chain, b""))


class CallerHandshake:
    """The caller's end."""

    def __init__(
        self, pair: KeyPair, listener: str, prologue: bytes, ephemeral: X25519PrivateKey | None = None
    ) -> None:
        """`ephemeral` is for tests."""
        self.secret = X25519PrivateKey.from_private_bytes(keys.decode(pair.secret))
        self.ephemeral = ephemeral or X25519PrivateKey.generate()
        self.listener = keys.decode(listener)
        self.transcript = Transcript(prologue, self.listener)

    def call(self, payload: bytes = b"") -> bytes:
        """Returns the first message. Whoever recorded it can send the payload again."""
        transcript, ephemeral = self.transcript, self.ephemeral.public_key().public_bytes_raw()
        transcript.add(ephemeral)
        transcript.mix(self.ephemeral, self.listener)
        public = transcript.encrypt(self.secret.public_key().public_bytes_raw())
        transcript.mix(self.secret, self.listener)
        return ephemeral + public + transcript.encrypt(payload)

    def read_answer(self, answer: bytes) -> bytes:
        """Returns the payload of the listener's message."""
        transcript, ephemeral = self.transcript, answer[:KEY]
        transcript.add(ephemeral)
        transcript.mix(self.ephemeral, ephemeral)
        transcript.mix(self.secret, ephemeral)
        return transcript.decrypt(answer[KEY:])


class ListenerHandshake:
    """The listener's end."""

    def __init__(self, pair: KeyPair, prologue: bytes, ephemeral: X25519PrivateKey | None = None) -> None:
        """`ephemeral` is for tests."""
        self.secret = X25519PrivateKey.from_private_bytes(keys.decode(pair.secret))
        self.given = ephemeral
        self.transcript = Transcript(prologue, self.secret.public_key().public_bytes_raw())
        self.caller = self.callers_ephemeral = b""

    def read_call(self, call: bytes) -> bytes:
        """Reads the caller's message, of which the `caller` is known, and returns its payload."""
        transcript, self.callers_ephemeral = self.transcript, call[:KEY]
        transcript.add(self.callers_ephemeral)
        transcript.mix(self.secret, self.callers_ephemeral)
        self.caller = transcript.decrypt(call[KEY : 2 * KEY + TAG])
        transcript.mix(self.secret, self.caller)
        return transcript.decrypt(call[2 * KEY + TAG :])

    def answer(self, payload: bytes = b"") -> bytes:
        transcript, ephemeral = self.transcript, self.given or X25519PrivateKey.generate()
        public = ephemeral.public_key().public_bytes_raw()
        transcript.add(public)
        transcript.mix(ephemeral, self.callers_ephemeral)
        transcript.mix(ephemeral, self.caller)
        return public + transcript.encrypt(payload)


def nonce(number: int) -> bytes:
    """Returns the nonce of what is encrypted as number `number` under its key."""
    return number.to_bytes(12, "big")


def derived(key: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Returns two keys (HKDF with SHA-256, without context)."""
    extracted = hmac.digest(key, data, "sha256")
    first = hmac.digest(extracted, b"\1", "sha256")
    return first, hmac.digest(extracted, first + b"\2", "sha256")
