"""A live run with its page, for tests: started as a user would, its folder removed at the end, and the page with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tests import forked

SCRIPT = Path(__file__).with_name("slow_script.py")
PATIENCE_S = 60.0


class LivePage:
    """The run, and the addresses that it has printed."""

    def __init__(self, folder: Path, program: forked.Program, out: IO[str]) -> None:
        self.folder = folder
        self.program = program
        self.out = out

    def address(self, which: str) -> str:
        found: list[str] = []

        def printed() -> bool:
            self.out.seek(0)
            found[:] = re.findall(rf"{which}: +(http\S+)", self.out.read())
            return bool(found)

        until(printed)
        return found[0]

    def cookie(self, which: str) -> tuple[str, str]:
        """Enters; returns the host and the cookie."""
        address = urlsplit(self.address(which))
        connection = http.client.HTTPConnection(address.netloc, timeout=PATIENCE_S)
        connection.request("GET", f"{address.path}?{address.query}")
        answer = connection.getresponse()
        connection.close()
        return address.netloc, answer.headers["set-cookie"].partition(";")[0]

    def views(self) -> Iterator[dict[str, Any]]:
        """Yields what the page is sent."""
        host, cookie = self.cookie("page of the run")
        connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        connection.request("GET", "/feed", headers={"Cookie": cookie})
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def control(self, what: str, body: str = "{}") -> tuple[int, str]:
        host, cookie = self.cookie("with controls")
        connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        connection.request("POST", f"/control/{what}", body, {"Cookie": cookie, "Origin": f"http://{host}"})
        answer = connection.getresponse()
        said = answer.read().decode()
        connection.close()
        return answer.status, said

    def pid_of(self, rank: int) -> int:
        """Returns the process of a worker, found by the trace that it has open."""
        name = f"worker-{rank}."
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                target = descriptor.readlink()
                if target.name.startswith(name) and target.is_relative_to(self.folder):
                    return int(descriptor.parts[2])
        raise LookupError(name)


def until(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.05)


@contextlib.contextmanager
def run_with_page(tmp_path: Path, *options: str) -> Iterator[LivePage]:
    folder = tmp_path / "run"
    command = ["-m", "paceline", "run", "--page", "--dir", folder, *options, SCRIPT]
    with (tmp_path / "out").open("w+") as out, (tmp_path / "errors").open("w+") as errors:
        program = forked.Program(command, out, errors, tmp_path)
        try:
            yield LivePage(folder, program, (tmp_path / "out").open())
        finally:
            program.kill()
            program.wait(PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)  # without it the page ends
