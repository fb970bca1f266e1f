"""What workers print comes through the driver as a terminal would show it in the end."""

from __future__ import annotations

import os

import pytest

from paceline.runtime.live.driver.echo import Echo
from paceline.runtime.live.sockets import Waiter


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\r0/50\r1/50\r50/50\nnext", ["50/50", "next"]),
        (b"\r10 %\r20 %", ["20 %"]),
        (b"from Windows\r\n", ["from Windows"]),
        (b"\n\xff\n", ["", "\ufffd"]),
    ],
)
def test_lines_and_progress_bars(written: bytes, said: list[str]) -> None:
    heard: list[str] = []
    waiter = Waiter()
    echo = Echo(waiter, heard.append)
    reading, writing = os.pipe()
    echo.listen(reading)
    os.write(writing, written)
    os.close(writing)
    echo.close_all()
    waiter.close()
    assert heard == said
