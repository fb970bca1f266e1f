"""What protects the bytes of one direction of a connection: checksums, or encryption that authenticates.

The bytes are sections, one behind the other, and behind each stands its seal, which also depends on its number. So a
section that was changed, left out, repeated or put elsewhere has a wrong seal. With AES-256-GCM the number is the
nonce, and after `REKEY` bytes both ends make a new key of the old one.

A short section is sealed and opened as a whole; a long one bit by bit, in the order of its bytes, and opened in place.
What was opened bit by bit must not be used before `check`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from paceline.runtime.live.messaging.checksum import crc32
from paceline.runtime.live.messaging.handshake import KEY, TAG, nonce
from paceline.runtime.live.messaging.transport import DAMAGED, ConnectionClosed

CRC = struct.Struct("<I")
REKEY = 1 << 36
"""Bytes that are encrypted under one key."""
LAST = (1 << 64) - 1
"""The number under which no section is encrypted: the next key is made with it."""


class OutgoingSection(Protocol):
    """A section that is sealed bit by bit."""

    step: int
    """Bytes that are best sealed at once."""

    def seal(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Returns these bytes as they travel. They must have left before the next call, which may use their memory."""

    def end(self) -> bytes:
        """Returns the seal."""


class IncomingSection(Protocol):
    """A section that is opened bit by bit."""

    def open(self, view: memoryview) -> None:
        """Has the memory, which holds what has come, hold what was sealed."""

    def check(self, seal: bytes) -> None:
        """Raises `ConnectionClosed` if this is not the seal of what was opened."""


class Seals(Protocol):
    """The seals of one direction, at one end."""

    size: int
    """Bytes of a seal."""

    def seal(self, section: bytes) -> bytes:
        """Returns a section as it travels, its seal behind it."""

    def open(self, sealed: bytes) -> bytes:
        """Returns the section; raises `ConnectionClosed` if its seal is wrong."""

    def begin_outgoing(self, size: int) -> OutgoingSection:
        """Begins a section of so many bytes. The next one may be begun before it ends."""

    def begin_incoming(self, size: int) -> IncomingSection:
        """Begins a section of so many bytes; one that is not opened at all is skipped."""


class SummedSection:
    """A section whose checksum is computed."""

    step = 1 << 22
    """The kernel takes few large pieces sooner than many small ones."""

    def __init__(self, crc: int) -> None:
        self.crc = crc

    def seal(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        for view in views:
            self.open(view)
        return views

    def end(self) -> bytes:
        return CRC.pack(self.crc)

    def open(self, view: memoryview) -> None:
        self.crc = crc32(view, self.crc)

    def check(self, seal: bytes) -> None:
        if seal != self.end():
            raise ConnectionClosed(DAMAGED)


class Checksums:
    """CRC-32, which begins with the section's number."""

    size = CRC.size

    def __init__(self) -> None:
        self.number = -1

    def begin_outgoing(self, size: int) -> SummedSection:
        self.number = (self.number + 1) % (1 << 32)
        return SummedSection(self.number)

    begin_incoming = begin_outgoing

    def seal(self, section: bytes) -> bytes:
        return section + CRC.pack(crc32(section, self.begin_outgoing(0).crc))

    def open(self, sealed: bytes) -> bytes:
        section = sealed[: -CRC.size]
        if self.seal(section) != sealed:
            raise ConnectionClosed(DAMAGED)
        return section


class EncryptedSection:
    """A section that is encrypted into memory of its own."""

    step = 1 << 19
    """What was encrypted is still in a cache when the kernel copies it."""

    def __init__(self, encryptor: AEADEncryptionContext, size: int) -> None:
        self.encryptor = encryptor
        self.memory = np.empty(min(size, self.step), np.uint8).data

    def seal(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        size = 0
        for view in views:
            self.encryptor.update_into(view, self.memory[size : size + view.nbytes])
            size += view.nbytes
        return (self.memory[:size],)

    def end(self) -> bytes:
        self.encryptor.finalize()
        return self.encryptor.tag


class DecryptedSection:
    """A section that is decrypted in place."""

    def __init__(self, decryptor: AEADDecryptionContext) -> None:
        self.decryptor = decryptor

    def open(self, view: memoryview) -> None:
        self.decryptor.update_into(view, view)

    def check(self, seal: bytes) -> None:
        try:
            self.decryptor.finalize_with_tag(seal)
        except InvalidTag:
            raise ConnectionClosed(DAMAGED) from None


class Encryption:
    """AES-256-GCM under the key of one direction."""

    size = TAG

    def __init__(self, key: bytes) -> None:
        self.number = -1
        self._use(key)

    def _use(self, key: bytes) -> None:
        self.key = key
        self.encrypted = 0
        """Bytes of the sections that were begun with this key."""
        self.cipher = AESGCM(key)

    def _next(self, size: int) -> bytes:
        """Returns the nonce of a section of so many bytes."""
        if self.encrypted + size > REKEY:
            self._use(self.cipher.encrypt(nonce(LAST), bytes(KEY), None)[:KEY])
        self.encrypted += size
        self.number += 1
        return nonce(self.number)

    def seal(self, section: bytes) -> bytes:
        return self.cipher.encrypt(self._next(len(section)), section, None)

    def open(self, sealed: bytes) -> bytes:
        try:
            return self.cipher.decrypt(self._next(len(sealed) - TAG), sealed, None)
        except InvalidTag:
            raise ConnectionClosed(DAMAGED) from None

    def begin_outgoing(self, size: int) -> EncryptedSection:
        return EncryptedSection(self._cipher(size).encryptor(), size)

    def begin_incoming(self, size: int) -> DecryptedSection:
        return DecryptedSection(self._cipher(size).decryptor())

    def _cipher(self, size: int) -> Cipher[GCM]:
        number = self._next(size)
        return Cipher(AES256(self.key), GCM(number))
