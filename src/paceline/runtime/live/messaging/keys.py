"""Key pairs of processes that talk between hosts: X25519, each key in 40 printable characters.

The characters are Z85: five of them for four bytes, in base 85. Keys of CURVE are the same.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec import Struct

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
VALUES = {character: value for value, character in enumerate(ALPHABET)}
SIZE = 32
"""Bytes of a key."""
CHARACTERS = 40


class KeyPair(Struct, frozen=True):
    """A key pair, as text."""

    public: str
    secret: str


def make_keys() -> KeyPair:
    secret = X25519PrivateKey.generate()
    return KeyPair(encode(secret.public_key().public_bytes_raw()), encode(secret.private_bytes_raw()))


def public_of(secret: str) -> str:
    """Returns the public key that belongs to a secret key."""
    return encode(X25519PrivateKey.from_private_bytes(decode(secret)).public_key().public_bytes_raw())


def is_key(text: str) -> bool:
    """Whether this text is 32 bytes, encoded."""
    try:
        return len(text) == CHARACTERS and len(decode(text)) == SIZE
    except ValueError:
        return False


def encode(key: bytes) -> str:
    """Returns the text of a key."""
    return "".join(
        ALPHABET[int.from_bytes(key[at : at + 4], "big") // 85**place % 85]
        for at in range(0, len(key), 4)
        for place in (4, 3, 2, 1, 0)
    )


def decode(text: str) -> bytes:
    """Returns the key that this text is of; raises `ValueError` if it is of none."""
    words = []
    for at in range(0, len(text), 5):
        word = 0
        for character in text[at : at + 5]:
            if character not in VALUES:
                raise ValueError("a character that no key has")
            word = 85 * word + VALUES[character]
        if word >= 1 << 32:
            raise ValueError("five characters that are no four bytes")
        words.append(word.to_bytes(4, "big"))
    return b"".join(words)
