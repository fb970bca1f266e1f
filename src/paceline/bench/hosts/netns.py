"""Several hosts on one machine: network namespaces, joined by veth to a bridge.

    with Hosts(3) as hosts:
        server = hosts[0].popen([sys.executable, "-m", "paceline", "serve"])
        hosts[1].run([sys.executable, "-m", "paceline", "join", f"tcp://{hosts[0].address}:7000"])
        hosts[2].cut()

A host has everything of its own that two machines do not have in common: addresses, hostname, process numbers (each
counts from 1), System V memory, /dev/shm and /tmp. The rest of the file system is the machine's, as a network file
system would be; `share` keeps one more folder in sight. All processes of a host see the same of it.

The bridge is in a namespace too, so nothing has a name on the machine: runs side by side cannot collide, and what a
killed harness leaves is nothing, since each namespace lives as long as its first process (`holder.py`), and that only
as long as the harness.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parents[2]
TOOLS = ("ip", "mount", "nsenter", "unshare")
KINDS = ("--mount", "--uts", "--ipc", "--net", "--pid")
SUBNET = "10.77.0"


def missing() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "several hosts need root (network namespaces)"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"several hosts need {', '.join(absent)} (util-linux, iproute2)"
    tried = subprocess.run(["unshare", *KINDS, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


class Process(subprocess.Popen[str]):
    """A process of a host. A parent of it stays outside (`enter.py`): signals go to the process."""

    def send_signal(self, number: int) -> None:
        inside = self.inside()
        if inside is not None:
            os.kill(inside, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def inside(self) -> int | None:
        """Its number on this machine (on its host it has another one); None when it has ended."""
        while self.poll() is None:
            for number in children(self.pid):
                return number
            time.sleep(0.001)  # the parent is about to fork
        return None


class _Namespaces:
    """One holder and its namespaces."""

    def __init__(self, name: str, visible: Sequence[Path] = ()) -> None:
        self.name = name
        script = [sys.executable, "-S", "-E", str(HERE / "holder.py"), name, *map(str, visible)]
        # A session of its own: an interrupt from the keyboard is for the harness.
        self._unshare = subprocess.Popen(
            ["unshare", *KINDS, "--fork", "--propagation", "private", *script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        said = self._unshare.stdout.readline().strip()
        if not said:
            self.end()
            raise RuntimeError(f"host {name} could not be made")
        self.holder = int(said)
        self.network = ["nsenter", "--target", said, "--net"]
        """Before a command: only the network is the namespaces'."""

    def end(self) -> None:
        assert self._unshare.stdin is not None
        assert self._unshare.stdout is not None
        self._unshare.stdin.close()
        self._unshare.wait(timeout=10)
        self._unshare.stdout.close()

    def ip(self, *arguments: str) -> None:
        subprocess.run([*self.network, "ip", *arguments], check=True)


class Host(_Namespaces):
    """One host; made by `Hosts`."""

    def __init__(self, number: int, switch: _Namespaces, visible: Sequence[Path]) -> None:
        super().__init__(f"host{number}", visible)
        self.address = f"{SUBNET}.{number + 1}"
        self._switch = switch
        self._port, self._line, self._joint = (f"{kind}{number}" for kind in ("port", "line", "joint"))
        self._line_process: subprocess.Popen[str] | None = None
        self._processes: list[Process] = []
        self._connected = True

    def join(self) -> None:
        """Lay the cable: one end is this host's `eth0`, the other one a port of the bridge."""
        cable = ["link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder)]
        self._switch.ip(*cable)
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")
        self._switch.ip("link", "set", self._port, "up")
        self._plug()

    def popen(self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any) -> Process:
        """Start a command on this host; `env` is added to the environment, `options` are those of `subprocess.Popen`.

        It ends with the host at the latest.
        """
        folder = str(options.pop("cwd", Path.cwd()))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp", **(env or {})}
        entering = [sys.executable, "-S", "-E", str(HERE / "enter.py"), str(self.holder), folder]
        options = {"text": True, "stdin": subprocess.DEVNULL, **options}
        process = Process([*entering, *map(str, command)], env=environment, **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str | Path], *, timeout: float = 60.0, check: bool = True, **options: Any) -> str:
        """Run a command to its end; what it printed."""
        with self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
            try:
                printed, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise AssertionError(f"{self.name}: {command} ended with {process.returncode}:\n{printed}")
        return printed

    def path(self, path: str | Path) -> Path:
        """A file of this host, as this machine sees it."""
        return Path(f"/proc/{self.holder}/root{path}")

    def processes(self) -> set[int]:
        """All that run on it, but its holder, by their numbers on this machine."""
        return members(os.readlink(f"/proc/{self.holder}/ns/pid")) - {self.holder}

    def cut(self) -> None:
        """Pull its cable out of the bridge. Packets are lost in silence, its own link stays up, connections stay."""
        self._connected = False
        self._plug()

    def heal(self) -> None:
        self._connected = True
        self._plug()

    def slow(
        self,
        delay_ms: float = 0.0,
        rate_mbit: float | None = None,
        loss: float = 0.0,
        damage: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Its packets take `delay_ms` longer, pass at a rate, get lost with a chance of `loss`, and are damaged with
        one of `damage` so that TCP does not see it, each way.

        Always the line in user space (`line.py`): the same on every kernel, with `netem` or without. It carries a
        few hundred Mbit/s, so a rate above that is not kept.
        """
        self.fast()
        self._switch.ip("link", "add", self._line, "type", "veth", "peer", "name", self._joint)
        # Each packet on its own, as on a wire: the kernel would hand over dozens in one piece.
        self._switch.ip("link", "set", self._joint, "gso_max_segs", "1")
        self.ip("link", "set", "eth0", "gso_max_segs", "1")
        self._switch.ip("link", "set", self._line, "up")
        self._switch.ip("link", "set", self._joint, "up")
        self._switch.ip("link", "set", self._port, "nomaster")
        options = json.dumps(
            {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "loss": loss, "damage": damage, "seed": seed}
        )
        command = [sys.executable, "-S", "-E", str(HERE / "line.py"), self._port, self._line, options]
        self._line_process = subprocess.Popen(
            [*self._switch.network, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._line_process.stdout is not None
        if self._line_process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{self.name}: the slow line did not come up")
        self._plug()

    def fast(self) -> None:
        """The line as it was at first."""
        if self._line_process is None:
            return
        self._line_process.kill()
        self._line_process.communicate()
        self._line_process = None
        self._switch.ip("link", "delete", self._line)
        self.ip("link", "set", "eth0", "gso_max_segs", "65535")
        self._plug()

    def _plug(self) -> None:
        end = self._port if self._line_process is None else self._joint
        self._switch.ip("link", "set", end, *(("master", "bridge0") if self._connected else ("nomaster",)))

    def crash(self) -> None:
        """As when the power fails: cut off first, so that no process says goodbye, then all of them are gone."""
        self.cut()
        self.end()

    def end(self) -> None:
        if self._unshare.poll() is not None:
            return
        self.fast()
        super().end()
        for process in self._processes:
            process.wait(timeout=10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Hosts(Sequence[Host]):
    """`n` hosts that reach each other, and nothing else; a context manager."""

    def __init__(self, n: int, share: Path | None = None) -> None:
        needed = {SOURCES, Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), *([share] if share else [])}
        below = sorted(folder for folder in {path.resolve() for path in needed} if folder.is_relative_to("/tmp"))
        # A folder inside one that is in sight already is in sight.
        self._visible = [one for one in below if not any(one != other and one.is_relative_to(other) for other in below)]
        self._n = n
        self._hosts: list[Host] = []
        self._ending = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as ending:
            switch = _Namespaces("switch")
            ending.callback(switch.end)
            switch.ip("link", "add", "bridge0", "type", "bridge")
            switch.ip("link", "set", "bridge0", "up")
            for number in range(self._n):
                host = Host(number, switch, self._visible)
                ending.callback(host.end)
                host.join()
                self._hosts.append(host)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def __getitem__(self, number: int) -> Host:  # type: ignore[override]
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)


def members(namespace: str) -> set[int]:
    """The processes of this machine in a namespace, by its name in /proc, as "pid:[4026531836]"."""
    found = set()
    kind = namespace.partition(":")[0]
    for link in [each / "ns" / kind for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            if os.readlink(link) == namespace:
                found.add(int(link.parent.parent.name))
        except OSError:
            continue
    return found


def children(parent: int) -> set[int]:
    """The processes of this machine that a process has started."""
    found = set()
    for stat in [each / "stat" for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.add(int(stat.parent.name))
    return found
