"""The run's key file: written for its owner alone, read only if it is whole and nobody else can read it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.runtime.live.messaging.key_files import KeyFile, from_text, read_key_file, to_line, write_key_file
from paceline.runtime.live.messaging.remote_links import make_keys

KEYS = KeyFile("tcp://10.0.0.1:7070", make_keys().public, make_keys())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text("what was there before, for all to read")
    path.chmod(0o644)
    write_key_file(path, KEYS)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == KEYS
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.key"]


def test_the_one_line_says_the_same() -> None:
    for _ in range(200):  # keys are random, and some have '=' or '#' in them
        keys = KeyFile("tcp://host-1.example:65535", make_keys().public, make_keys())
        line = to_line(keys)
        assert "\n" not in line
        assert from_text(line, "the line") == keys


def test_no_other_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    for mode in (0o640, 0o604, 0o620):
        write_key_file(path, KEYS)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=re.escape(f"is open to others (mode {mode:04o}): chmod 600 {path}")):
            read_key_file(path)


OTHER = make_keys()
GOOD = to_line(KEYS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "address is missing"),
        (GOOD.replace("server=", "sever="), "'sever' is none of address="),
        (GOOD + " " + GOOD, "address is there twice"),
        (GOOD[:-1], "secret is not a key: 40 characters"),
        (GOOD.replace(KEYS.server, KEYS.server[:-1] + "~"), "server is not a key"),
        (GOOD.replace(KEYS.server, "#" * 40), "server is not a key"),  # more than 32 bits in five characters
        (GOOD.replace(KEYS.client.public, OTHER.public), "public and secret are not of one pair"),
        (GOOD.replace("tcp://10.0.0.1:7070", "tcp://10.0.0.1"), "address is 'tcp://10.0.0.1', must be tcp://HOST:PORT"),
        (GOOD.replace(":7070", ":70700"), "must be tcp://HOST:PORT"),
        (GOOD.replace(":7070", ":0"), "must be tcp://HOST:PORT"),
        (GOOD.replace("tcp:", "ipc:"), "must be tcp://HOST:PORT"),
        ("x" * 5000, "has more than 4096 bytes"),
        ("\x00\xff", "is not text"),
    ],
    ids=lambda given: "text" if KEYS.client.public in given or OTHER.public in given else None,
)
def test_what_is_no_key_file_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.key"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refusal:
        read_key_file(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert KEYS.client.secret not in str(refusal.value)


def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the key file .*: No such file"):
        read_key_file(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_key_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_key_file(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot write the key file .*: No such file"):
        write_key_file(tmp_path / "nowhere" / "run.key", KEYS)
