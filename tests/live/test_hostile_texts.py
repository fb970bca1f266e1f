"""A text from another host never becomes a path, a module or code here."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from paceline import policies
from paceline.core.messages import Members
from paceline.errors import ConfigError, printable
from paceline.runtime.live.protocol import driver_texts
from paceline.runtime.live.protocol.configuration import LiveConfig
from tests import forked

OWN = """
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from paceline.policies import CentralPolicy, option

with Path(__file__).with_name("ran").open("a") as file:
    file.write(f"{os.getpid()} {os.getppid()}\\n")

@dataclass(frozen=True)
class Evil(CentralPolicy):
    name: ClassVar[str] = "evil"
    on_arrival: ClassVar[bool] = True
    bound: int = option(0, low=0, doc="nothing")

    def may_pull(self, i, V):
        return True
"""
SCRIPT = """
import sys, torch, paceline
model = torch.nn.Linear(4, 1)
policy = sys.argv[1] or None
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
for _ in range(5):
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "evil.py"
    path.write_text(OWN)
    return path


def ran(own: Path) -> set[int]:
    """The processes that have run the file, and their parents."""
    file = own.with_name("ran")
    return {int(number) for number in file.read_text().split()} if file.exists() else set()


def test_hostile_texts_open_nothing_and_run_nothing(own: Path) -> None:
    folder = own.parent
    for name in ("evil.safetensors", "evil.edges", "evil.jsonl"):
        (folder / name).write_text("0 1\n1 0\n")
    (folder / "nonce").write_text(folder.name)
    script = Path(__file__).with_name("hostile.py")
    done = forked.run([script, folder])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1, done.stdout
    assert not ran(own)


def test_every_process_of_a_run_reads_policies_and_scenarios_in_one_place() -> None:
    """`driver_texts.py` knows whether the driver is another host's; logs and the driver's choice are read elsewhere."""
    live = Path(driver_texts.__file__).parents[1]
    allowed = {"protocol/driver_texts.py", "driver/beginning.py", "server/log_replay.py"}
    readers = ("policies.parse(", "cluster.from_table(", "clusters.load(", "user_code.run(", "user_code.load(")
    found = {str(path.relative_to(live)) for path in live.rglob("*.py") for each in readers if each in path.read_text()}
    assert found <= allowed


def test_a_catalogue_policy_is_read_as_it_was_written() -> None:
    for text in ("ssp:staleness=3+backup:extra=1", "bsp@0,ssp:staleness=3@100", "specsync:base=ssp(staleness=2)"):
        assert str(policies.parse_remote(text)) == str(policies.parse(text))


def test_a_guest_takes_a_file_only_if_its_own_script_or_command_line_names_it(own: Path, tmp_path: Path) -> None:
    elsewhere = "/somewhere/else/evil.py:Evil:bound=2"
    config = LiveConfig(Members(1, 1), 0, None, "", "eps", guest=True)
    with pytest.raises(ConfigError, match="only taken from this host's own"):
        driver_texts.policy_of(elsewhere, config)
    script = policies.parse(f"{own}:Evil:bound=2")
    assert driver_texts.policy_of(elsewhere, config, script) is script
    with pytest.raises(ConfigError):
        driver_texts.policy_of("/somewhere/else/evil.py:Evil:bound=3", config, script)
    by_command = LiveConfig(Members(1, 1), 0, None, "", "eps", guest=True, own_policy=f"{own}:Evil:bound=2")
    assert driver_texts.policy_of(elsewhere, by_command) == script


def test_what_is_shown_does_not_command_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x9bc\u202ed\r") == "a\\x1b[2Jb\\x9bc\\u202ed\\r"
    assert printable("déjà vu\n\t漢") == "déjà vu\n\t漢"


class Two:
    """A `paceline serve` and a `paceline join` on this machine, as if on two."""

    def __init__(self, folder: Path, serve: list[str], policy: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        key = str(folder / "run.key")
        line = ["serve", "--bind", self.address, "--key-file", key, "--dir", str(folder / "run"), *serve]
        self.serve = self.start("serve", line)
        while not Path(key).exists():
            assert self.serve.poll() is None, self.log("serve")
            time.sleep(0.02)
        self.join = self.start("join", ["join", self.address, "--key-file", key, str(folder / "train.py"), policy])

    def start(self, name: str, line: list[str]) -> forked.Program:
        with (self.folder / f"{name}.log").open("w") as log:
            return forked.Program(["-m", "paceline", *line], log, log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in (self.join, self.serve):
            process.kill(signal.SIGTERM)
            process.wait(timeout=30)


def test_whoever_joins_cannot_have_the_serving_machine_run_a_file(own: Path, tmp_path: Path) -> None:
    two = Two(tmp_path, [], f"{own}:Evil")
    try:
        assert two.join.wait(timeout=100) != 0
        assert "another host names the file" in two.log("join")
        assert ran(own), "its own process may run it"
        assert two.serve.pid not in ran(own)
        assert two.serve.poll() is None, "the run goes on waiting for others"
    finally:
        two.close()


def test_whoever_serves_cannot_have_a_joiner_run_a_file(own: Path, tmp_path: Path) -> None:
    two = Two(tmp_path, ["--policy", f"{own}:Evil"], "")
    try:
        assert two.join.wait(timeout=100) != 0
        assert "another host names the file" in two.log("join")
        assert two.serve.pid in ran(own)
        assert two.join.pid not in ran(own)
    finally:
        two.close()


def test_a_file_that_both_sides_name_themselves_is_used(own: Path, tmp_path: Path) -> None:
    """Each has a file of that name in a folder of its own, and runs that one."""
    (tmp_path / "joiner").mkdir()
    theirs = tmp_path / "joiner" / own.name
    theirs.write_text(OWN)
    two = Two(tmp_path, ["--policy", f"{own}:Evil"], f"{theirs}:Evil")
    try:
        assert two.join.wait(timeout=100) == 0, two.log("join")
        assert two.serve.wait(timeout=100) == 0, two.log("serve")
        assert two.serve.pid in ran(own)
        assert two.join.pid in ran(theirs), "its worker is a child of it"
        assert two.serve.pid not in ran(theirs)
        assert two.join.pid not in ran(own)
        assert f"{own}:Evil" in (tmp_path / "run" / "metrics.json").read_text()
    finally:
        two.close()
