"""Where launchers put a process, as their variables say it, and the store the processes find each other by."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import session
from paceline.errors import ConfigError, RunFailed
from paceline.runtime.live.launchers.adopted_processes import AdoptedProcess, adopter, left_path, pid_path, write_pid
from paceline.runtime.live.launchers.launcher_environment import Place, nodes_of, read_place, tasks_per_node
from paceline.runtime.live.launchers.rendezvous import AgentThere, DriverThere, FolderThere, RendezvousStore
from paceline.runtime.live.messaging.addresses import address_of, address_towards

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_torchrun_says_where_a_process_is() -> None:
    expected = Place("torchrun", 5, 12, 1, 4, 1, 3, "mine", "node1", 29500, True, 2)
    assert read_place(TORCHRUN) == expected
    assert read_place({**SLURM, **TORCHRUN}) == expected, "torchrun under srun"


def test_slurm_says_where_a_process_is() -> None:
    place = read_place(SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size, place.node, place.nodes) == (5, 8, 1, 4, 1, 2)
    assert (place.name, place.master, place.has_store) == ("4711.0", "node01", False)
    assert 1024 < place.port < 32768
    other = read_place({**SLURM, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.port != place.port, "two steps of a job may run at once"
    moved = read_place({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"})
    assert moved is not None
    assert (moved.master, moved.port) == ("10.0.0.1", 7000)


def test_without_a_launcher_there_is_no_place() -> None:
    assert read_place({}) is None
    assert read_place({"RANK": "1", "WORLD_SIZE": "2"}) is None
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_place(batch_script) is None


def test_an_interactive_shell_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    for name, value in {**SLURM, **alone, "SLURM_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert session.init().size == 1
    session.leave(well=True)


@pytest.mark.parametrize(
    ("given", "changed", "line"),
    [
        (TORCHRUN, {"RANK": "x"}, "RANK='x', which torchrun has set, is no number from 0 on"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE='0', which torchrun has set, is no number from 1 on"),
        (TORCHRUN, {"RANK": "12"}, "torchrun says that this is rank 12 of 12, which cannot be"),
        (TORCHRUN, {"GROUP_RANK": None}, "torchrun has started this process, but has not set GROUP_RANK"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port: 1 to 65535"),
        (SLURM, {"SLURM_STEP_NODELIST": "node[01-"}, "'node[01-' is no list of nodes, as node[01-03,07] is"),
        (SLURM, {"SLURM_NODEID": "2"}, "Slurm says that this is node 2, but speaks of the tasks of 2 nodes"),
        (SLURM, {"SLURM_TASKS_PER_NODE": "4(x"}, "'4(x' does not say how many tasks each node has, as 4(x2),3 does"),
        (
            SLURM,
            {"SLURM_TASKS_PER_NODE": None},
            "Slurm has started this process, but has not set SLURM_NTASKS_PER_NODE",
        ),
    ],
)
def test_what_cannot_be_is_one_line(given: dict[str, str], changed: dict[str, str | None], line: str) -> None:
    environment = {name: value for name, value in {**given, **changed}.items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        read_place(environment)
    assert str(raised.value) == line


def test_lists_of_nodes() -> None:
    assert nodes_of("node[01-03,07]") == ["node01", "node02", "node03", "node07"]
    assert nodes_of("a,b[9-11]-ib,c") == ["a", "b9-ib", "b10-ib", "b11-ib", "c"]
    assert nodes_of("r[1-2]n[1,3]") == ["r1n1", "r1n3", "r2n1", "r2n3"]
    for text in ("", "a,,b", "a[", "a]", "a[]", "a[2-1]", "a[x]", "a b", "a[0-999999999]"):
        with pytest.raises(ConfigError, match="is no list of nodes"):
            nodes_of(text)
    assert tasks_per_node("4(x2),3") == [4, 4, 3]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_notes_on_the_board() -> None:
    place = Place("Slurm", 0, 2, 0, 1, 0, 2, "1.0", "127.0.0.1", free_port(), False)
    seen: list[DriverThere] = []

    def agent() -> None:
        board = RendezvousStore(place)  # before the driver's is there
        board.put("agent-1", AgentThere("key", "token"))
        seen.append(board.wait_for("driver", DriverThere))

    thread = threading.Thread(target=agent)
    thread.start()
    board = RendezvousStore(place, make=True)
    assert board.wait_for("agent-1", AgentThere) == AgentThere("key", "token")
    board.put("driver", DriverThere("tcp://127.0.0.1:7000", "its key"))
    board.put("folder", FolderThere("runs/x"), keep_over_attempts=True)
    thread.join(30)
    assert seen == [DriverThere("tcp://127.0.0.1:7000", "its key")]
    again = RendezvousStore(replace(place, attempt=1))
    assert again.read("driver", DriverThere) is None, "an attempt does not read what the one before has left"
    assert again.read("folder", FolderThere, keep_over_attempts=True) == FolderThere("runs/x")
    again.notes.set("driver", "nonsense")
    with pytest.raises(RunFailed, match="the store's driver is not what it should be"):
        again.read("driver", DriverThere)


def test_a_process_that_is_adopted(tmp_path: Path) -> None:
    """A child of this process stands for a launcher's."""
    for goodbye in (False, True):
        (there, say_there), (go_on, say_go_on) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            write_pid(pid_path(tmp_path, 3))
            os.write(say_there, b".")
            os.read(go_on, 1)
            if goodbye:
                left_path(tmp_path, 3).touch()
            os._exit(0)
        os.read(there, 1)
        child = adopter().start(3, 0, tmp_path)
        assert isinstance(child, AdoptedProcess)
        assert child.pid == pid
        assert not child.has_left()
        os.write(say_go_on, b".")
        assert child.reap() == (0 if goodbye else 1), "who has not said goodbye has failed"
        assert child.has_left() is goodbye
        os.waitpid(pid, 0)
        for descriptor in (there, say_there, go_on, say_go_on):
            os.close(descriptor)
    with pytest.raises(RunFailed, match="worker 3 is not to be had again"):
        adopter().start(3, 1, tmp_path)
    with pytest.raises(RunFailed, match="the process of pid-3 is not there"):
        AdoptedProcess(tmp_path, 3)


def test_addresses() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="interface 'nothing0' has no address here"):
        address_of("nothing0")
    with pytest.raises(ConfigError, match="cannot be reached"):
        address_towards("no-such-host.invalid", 1)
