"""The run's key file: what a host needs to join a run, on one page or in one line.

It says where the driver listens, the driver's public key, and the pair of keys the host is known by. Whoever has it can
join the run, so nobody but its owner may be able to read it. The one line is the same for copying it by hand.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from msgspec import Struct

from paceline import private_files
from paceline.errors import ConfigError
from paceline.runtime.live.messaging.keys import KeyPair, is_key, public_of

LARGEST = 4096
"""Bytes that a key file may have. It has some 250."""
PREFACE = "# paceline: whoever can read this can join the run and read what it says.\n"
ADDRESS = re.compile(r"tcp://([A-Za-z0-9._-]+):([0-9]{1,5})")
ENTRIES = ("address", "server", "public", "secret")


class KeyFile(Struct, frozen=True):
    address: str
    """tcp://HOST:PORT of the driver's listener."""
    server: str
    """The driver's public key."""
    client: KeyPair
    """The key pair of the host that joins."""


def to_line(keys: KeyFile) -> str:
    """Returns the key file as one line."""
    values = (keys.address, keys.server, keys.client.public, keys.client.secret)
    return " ".join(f"{entry}={value}" for entry, value in zip(ENTRIES, values, strict=True))


def from_text(text: str, where: str) -> KeyFile:
    """Parses what `to_line` or a key file says. Error messages name `where` it was found."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        for word in () if line.startswith("#") else line.split():
            entry, _, value = word.partition("=")
            if entry not in ENTRIES or not value:
                allowed = ", ".join(f"{known}=..." for known in ENTRIES)
                raise ConfigError(f"{where}: {shortened(entry)!r} is none of {allowed}")
            if entry in found:
                raise ConfigError(f"{where}: {entry} is there twice")
            found[entry] = value
    for entry in ENTRIES:
        if entry not in found:
            raise ConfigError(f"{where}: {entry} is missing")
        if entry != "address" and not is_key(found[entry]):
            raise ConfigError(f"{where}: {entry} is not a key: 40 characters as paceline prints them")
    address = ADDRESS.fullmatch(found["address"])
    if address is None or not 0 < int(address[2]) < 1 << 16:
        raise ConfigError(f"{where}: address is {shortened(found['address'])!r}, must be tcp://HOST:PORT")
    if public_of(found["secret"]) != found["public"]:
        raise ConfigError(f"{where}: public and secret are not of one pair")
    return KeyFile(found["address"], found["server"], KeyPair(found["public"], found["secret"]))


def write_key_file(path: Path, keys: KeyFile) -> None:
    """Replaces a key file atomically; others can read it at no time."""
    try:
        private_files.replace(path, (PREFACE + to_line(keys).replace(" ", "\n") + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from None


def read_key_file(path: Path) -> KeyFile:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            data = file.read(LARGEST + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the key file {path} is not a file")
    if mode & 0o077:
        raise ConfigError(f"the key file {path} is open to others (mode {mode & 0o777:04o}): chmod 600 {path}")
    if len(data) > LARGEST:
        raise ConfigError(f"the key file {path} is no key file: it has more than {LARGEST} bytes")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"the key file {path} is no key file: it is not text") from None
    return from_text(text, f"the key file {path}")


def shortened(text: str) -> str:
    """Cuts a text for an error message."""
    return text if len(text) <= 40 else f"{text[:37]}..."
