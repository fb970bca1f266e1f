"""The hosts themselves: what they have in common, what they do not, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench.hosts.netns import Host, Hosts, members

ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = listener.accept()
while data := connection.recv(1 << 16):
    connection.sendall(data)
"""
"""Sends back what it gets on its first connection."""

ASK = """
import socket, sys, threading, time
connection = socket.create_connection((sys.argv[1], 7000), timeout=60)
for line in sys.stdin:
    began = time.monotonic()
    data = line.encode() * int(sys.argv[2])
    threading.Thread(target=connection.sendall, args=[data]).start()
    left = len(data)
    while left:
        left -= len(connection.recv(1 << 16))
    print(time.monotonic() - began, flush=True)
"""
"""Each line of its input there and back, repeated; prints how long it took. It reads while it sends: if both ends only
sent, with their buffers full, they would wait for each other."""

PING = """
import select, socket, struct, sys, time
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF
wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
sent, took = {}, []
for number in range(int(sys.argv[2])):
    request = struct.pack("!BBHHH", 8, 0, 0, 7, number)
    request = request[:2] + struct.pack("!H", checksum(request)) + request[4:]
    sent[number] = time.monotonic()
    wire.sendto(request, (sys.argv[1], 0))
while len(took) < len(sent) and select.select([wire], [], [], 1)[0]:
    kind, _, _, _, number = struct.unpack("!BBHHH", wire.recv(1500)[20:28])
    if kind == 0:
        took.append(1000 * (time.monotonic() - sent[number]))
print(len(took), min(took, default=0))
"""
"""Echo requests, which the other kernel answers: how many came back, and milliseconds of the quickest."""


def ping(host: Host, address: str, count: int = 1) -> tuple[int, float]:
    answered, quickest_ms = host.run([sys.executable, "-S", "-c", PING, address, str(count)]).split()
    return int(answered), float(quickest_ms)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


class Conversation:
    """A connection from host 1 to host 0 that stays open."""

    def __init__(self, hosts: Hosts, repeat: int = 1) -> None:
        echo = hosts[0].popen([sys.executable, "-c", ECHO, hosts[0].address], stdout=subprocess.PIPE)
        assert echo.stdout is not None
        assert echo.stdout.readline() == "listening\n"
        command = [sys.executable, "-u", "-c", ASK, hosts[0].address, str(repeat)]
        self.process = hosts[1].popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, text: str = "hello") -> None:
        assert self.process.stdin is not None
        print(text, file=self.process.stdin, flush=True)

    def answered_s(self) -> float:
        """Seconds it took; waits for the answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the connection broke"
        return float(line)


def test_a_host_has_its_own_memory_names_and_processes(hosts: Hosts) -> None:
    for folder in ("/dev/shm", "/tmp"):
        hosts[0].run(["touch", f"{folder}/of-host-0"])
        assert hosts[0].run(["ls", folder]).split().count("of-host-0") == 1, "commands of a host share its memory"
        assert "of-host-0" not in hosts[1].run(["ls", folder])
        assert not Path(folder, "of-host-0").exists()
        assert hosts[0].path(f"{folder}/of-host-0").exists()
    assert [host.run(["hostname"]).strip() for host in hosts] == ["host0", "host1"]
    sleeper = hosts[0].popen(["sleep", "60"])
    assert sleeper.inside() in hosts[0].processes()
    assert "sleep" in hosts[0].run(["ps", "-e"])
    assert "sleep" not in hosts[1].run(["ps", "-e"])
    assert hosts[0].run([sys.executable, "-c", "import paceline, torch; print(paceline.__name__)"], timeout=90)


def test_a_folder_can_be_shared(tmp_path: Path) -> None:
    with Hosts(2, share=tmp_path) as hosts:
        hosts[0].run(["sh", "-c", f"echo key > {tmp_path}/run.key"])
        assert hosts[1].run(["cat", f"{tmp_path}/run.key"]) == "key\n"


def test_a_connection_outlives_a_cut(hosts: Hosts) -> None:
    conversation = Conversation(hosts)
    conversation.say()
    assert conversation.answered_s() < 1
    hosts[1].cut()
    conversation.say()
    time.sleep(2)
    assert ping(hosts[1], hosts[0].address)[0] == 0
    assert conversation.process.poll() is None
    hosts[1].heal()
    assert 2 < conversation.answered_s() < 20
    conversation.say()
    assert conversation.answered_s() < 1


def test_a_slow_line_delays_limits_and_loses_packets(hosts: Hosts) -> None:
    conversation = Conversation(hosts, repeat=100_000)  # 600 kB each way
    hosts[1].slow(delay_ms=50)
    answered, quickest_ms = ping(hosts[0], hosts[1].address)
    assert answered == 1
    assert 100 <= quickest_ms < 400, "there and back; once more there and back if the address is asked for first"
    hosts[1].slow(rate_mbit=10)
    conversation.say()
    assert 0.48 < conversation.answered_s() < 10, "600 kB at 10 Mbit/s, both ways at once"
    hosts[1].slow(loss=0.3, seed=1)
    conversation.say()
    assert 25 < ping(hosts[0], hosts[1].address, count=100)[0] < 75, "of 100 there and back, 49 on average"
    hosts[1].slow(delay_ms=1)
    conversation.answered_s()  # sent once more now that packets are not lost; while they are it may take minutes
    assert ping(hosts[0], hosts[1].address)[0] == 1
    hosts[1].cut()
    assert ping(hosts[0], hosts[1].address)[0] == 0
    hosts[1].fast()
    hosts[1].heal()
    conversation.say()
    assert conversation.answered_s() < 5


def test_signals_reach_the_process(hosts: Hosts) -> None:
    sleeper = hosts[0].popen(["sleep", "60"])
    sleeper.send_signal(signal.SIGSTOP)
    sleeper.kill()
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    sleeper = hosts[0].popen(["sleep", "60"])
    sleeper.terminate()
    assert sleeper.wait(timeout=5) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        hosts[0].run(["sleep", "60"], timeout=0.2)
    hosts[0].popen(["sleep", "60"]).send_signal(signal.SIGSTOP)  # the end waits for nobody


def test_orphans_do_not_stay_as_zombies(hosts: Hosts) -> None:
    orphan = hosts[0].run(["sh", "-c", "sleep 0.1 >/dev/null 2>&1 & echo $!"]).strip()
    hosts[0].run(["sh", "-c", f"while [ -e /proc/{orphan} ]; do sleep 0.02; done"], timeout=10)


def test_a_crashed_host_says_nothing(hosts: Hosts) -> None:
    conversation = Conversation(hosts)
    conversation.say()
    conversation.answered_s()
    network = os.readlink(f"/proc/{hosts[0].holder}/ns/net")
    hosts[0].crash()
    assert not members(network)
    conversation.say()
    with pytest.raises(subprocess.TimeoutExpired):
        conversation.process.wait(timeout=1)
    assert hosts[1].run(["echo", "alive"]) == "alive\n"


def seen() -> tuple[str, str, str]:
    """What the machine has of network and mounts."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    named = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return links, named, Path("/proc/self/mounts").read_text()


def test_nothing_is_left_after_the_end_or_a_failure() -> None:
    before = seen()
    networks: list[str] = []

    def use() -> None:
        with Hosts(2) as hosts:
            hosts[0].slow(delay_ms=1)
            # A grandchild that has left its session, and an orphan.
            hosts[0].popen(["sh", "-c", "setsid sleep 600 & setsid sleep 600"], stdout=subprocess.PIPE)
            hosts[1].run(["sh", "-c", "sleep 600 >/dev/null 2>&1 &"])
            networks.extend(os.readlink(f"/proc/{host.holder}/ns/net") for host in hosts)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert len(networks) == 2
    assert not any(members(network) for network in networks)
    assert seen() == before


def test_nothing_is_left_when_the_harness_is_killed() -> None:
    before = seen()
    script = """
import os, sys, time
from paceline.bench.hosts.netns import Hosts
with Hosts(2) as hosts:
    hosts[0].slow(delay_ms=1)
    hosts[0].popen(["setsid", "sleep", "600"])
    print(*(os.readlink(f"/proc/{host.holder}/ns/net") for host in (*hosts, hosts[0]._switch)), flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        networks = harness.stdout.readline().split()
        harness.kill()
    assert len(networks) == 3
    deadline = time.monotonic() + 10
    while any(members(network) for network in networks):
        assert time.monotonic() < deadline, "processes were left"
        time.sleep(0.05)
    assert seen() == before
