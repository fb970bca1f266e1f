"""`paceline bench thin`: training over thin lines between hosts, with local steps and a code, beside DDP over Gloo.

Three hosts of one machine (`hosts/netns.py`), each with a line that is as slow as it is told to be, in user space. The
first host has the server and a worker, the others a worker each. Bytes are those that the hosts' network devices have
sent, everything included: the model at the beginning, acknowledgements, what holds connections up.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline import run_folder, workloads
from paceline.bench.hosts import netns
from paceline.bench.hosts.netns import Host, Hosts, Process
from paceline.core.actions import Compute
from paceline.core.events import GradientReady
from paceline.core.trace import Trace
from paceline.errors import ConfigError, PacelineError
from paceline.run import Run

WORKER = Path(__file__).with_name("thin_worker.py")
NO_LINE = "none"
DDP_STEPS = 20
PORT = 7000
LINE = re.compile(r"(\d+(?:\.\d+)?)Mbit/(\d+(?:\.\d+)?)ms")
LONGEST_S = 3600.0


@dataclass(frozen=True)
class Line:
    """A line between two hosts: its rate, and how long a packet takes one way."""

    mbit: float
    delay_ms: float

    def __str__(self) -> str:
        return f"{self.mbit:g}Mbit/{self.delay_ms:g}ms"


@dataclass(frozen=True)
class Setting:
    """What is trained, by one worker on each host."""

    workload: str
    optimizer: str
    batch: int
    steps: int
    hosts: int = 3


@dataclass
class Row:
    """How one way to train fared over one line; `computing_share` is None where nobody looks at it."""

    link: str
    name: str
    computing_share: float | None
    loss: float | None
    bytes: int
    time_s: float
    steps: int


def read_line(text: str) -> Line:
    """Reads a line's text, as "50Mbit/50ms"."""
    match = LINE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is no line: its rate and its delay, as 50Mbit/50ms")
    return Line(float(match[1]), float(match[2]))


def run(
    setting: Setting, lines: list[Line], local_steps: int, wire: str, short: int, say: Callable[[str], None]
) -> list[Row]:
    """Trains over each line, DDP `DDP_STEPS` beside it, then without lines, exchanging at every step.

    The first line is trained over to the end; the others for `short` rounds, to see that nobody is lost.
    """
    if (why_not := netns.missing()) is not None:
        raise PacelineError(why_not)
    rows = []
    for number, line in enumerate(lines):
        steps = setting.steps if number == 0 else min(setting.steps, short * local_steps)
        rows.append(train(setting, line, local_steps, wire, steps, say))
        say(told(rows[-1]))
        rows.append(ddp(setting, line))
        say(told(rows[-1]))
    rows.append(train(setting, None, None, "float32", setting.steps, say))
    say(told(rows[-1]))
    return rows


def told(row: Row) -> str:
    share = "" if row.computing_share is None else f", {row.computing_share:.0%} of the time computing"
    loss = "" if row.loss is None else f", loss {row.loss:.4f}"
    return f"{row.link}, {row.name}: {row.steps} steps in {row.time_s:.0f} s{share}{loss}, {row.bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def hosts_with(line: Line | None, count: int) -> Iterator[tuple[Hosts, Path]]:
    """Hosts that reach each other over such lines, and a folder that all see."""
    with tempfile.TemporaryDirectory(prefix="paceline-thin-") as name, Hosts(count, share=Path(name)) as hosts:
        for host in hosts:
            if line is not None:
                # A packet passes the lines of both hosts.
                host.slow(delay_ms=line.delay_ms / 2, rate_mbit=line.mbit)
        yield hosts, Path(name)


def train(
    setting: Setting, line: Line | None, local_steps: int | None, wire: str, steps: int, say: Callable[[str], None]
) -> Row:
    """Trains with paceline: a server on the first host, a worker on each."""
    with hosts_with(line, setting.hosts) as (hosts, folder):
        key, out = folder / "run.key", folder / "run"
        served = ["serve", "--bind", f"tcp://{hosts[0].address}:{PORT}", "--key-file", str(key), "--dir", str(out)]
        served += ["--workers", str(setting.hosts), "--policy", "bsp", "--wire", wire]
        served += ["--local-steps", str(local_steps)] if local_steps is not None else []
        processes = [start(hosts[0], folder / "serve.log", served)]
        wait_for(lambda: key.exists(), processes, folder)
        script = [str(WORKER), "paceline", setting.workload, setting.optimizer, str(setting.batch), str(steps)]
        for number, host in enumerate(hosts):
            joined = ["join", f"tcp://{hosts[0].address}:{PORT}", "--key-file", str(key), *script]
            processes.append(start(host, folder / f"join{number}.log", joined))
        wait_for(lambda: all(process.poll() is not None for process in processes), processes, folder)
        nbytes = sum(map(sent_bytes, hosts))
        trained = run_folder.load(out)
        # What the driver says of a member that it gives up, and of one that comes back.
        lost = [text for text in (folder / "serve.log").read_text().splitlines() if "silent" in text]
        for text in lost:
            say(f"LOST: {text}")
    policy = "bsp" if local_steps is None else f"bsp local_steps={local_steps}"
    name = policy if wire == "float32" else f"{policy} {wire}"
    link = NO_LINE if line is None else str(line)
    return Row(link, name, computing_share(trained.trace), test_loss(trained, setting), nbytes, trained.time_s, steps)


def ddp(setting: Setting, line: Line) -> Row:
    """Trains with DDP over Gloo for a few steps."""
    with hosts_with(line, setting.hosts) as (hosts, _):
        address = f"tcp://{hosts[0].address}:{PORT}"
        trained = ["ddp", setting.workload, setting.optimizer, setting.batch, DDP_STEPS]
        processes = [
            host.popen(
                [sys.executable, str(WORKER), *map(str, [*trained, rank, setting.hosts, address])],
                env={"GLOO_SOCKET_IFNAME": "eth0"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        said = [process.communicate(timeout=LONGEST_S)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise PacelineError(f"DDP failed over {line}")
        nbytes = sum(map(sent_bytes, hosts))
    alone, whole = ([json.loads(text.splitlines()[-1])[kind] for text in said] for kind in ("alone", "all"))
    return Row(str(line), "ddp over gloo", sum(alone) / sum(whole), None, nbytes, max(whole), DDP_STEPS)


def start(host: Host, log: Path, arguments: list[str]) -> Process:
    with log.open("w") as file:
        return host.popen([sys.executable, "-m", "paceline", *arguments], stdout=file, stderr=subprocess.STDOUT)


def wait_for(happened: Callable[[], bool], processes: list[Process], folder: Path) -> None:
    """Waits until it has happened; raises if a process fails before."""
    until = time.monotonic() + LONGEST_S
    while not happened():
        if time.monotonic() > until or any(process.poll() not in (None, 0) for process in processes):
            raise PacelineError("training over the line failed:\n" + logs(folder))
        time.sleep(0.1)
    if any(process.poll() not in (None, 0) for process in processes):
        raise PacelineError("training over the line failed:\n" + logs(folder))


def logs(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))


def sent_bytes(host: Host) -> int:
    """Returns what the host's network device has sent."""
    for line in Path(f"/proc/{host.holder}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise PacelineError(f"{host.name} has no network")


def computing_share(trace: Trace) -> float:
    """Returns the share of their time that workers compute, from their first iteration to their last gradient."""
    began: dict[tuple[str, int], float] = {}
    first: dict[tuple[str, int], float] = {}
    last: dict[tuple[str, int], float] = {}
    computing = 0.0
    for record in trace.records:
        node = (record.node[0], record.node[1])
        if isinstance(record.event, GradientReady) and node in began:
            computing += record.event.at - began.pop(node)
            last[node] = record.event.at
        if any(isinstance(action, Compute) for action in record.actions):
            began[node] = record.event.at
            first.setdefault(node, record.event.at)
    whole = sum(last[node] - first[node] for node in last)
    return computing / whole if whole else 0.0


def test_loss(run: Run, setting: Setting) -> float:
    workload = workloads.load(setting.workload)
    module = workload.module(0)
    module.load_state_dict(run.model())
    return float(workload.evaluate(module)["loss"])
