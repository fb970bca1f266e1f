"""What the programs that break runs on purpose share: looking at processes, and at what is left of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from paceline.core.actions import Apply, Drop, Reduce
from paceline.core.events import OfferArrived, PushArrived, ReplyArrived, UpdateArrived
from paceline.core.messages import Handle, Node
from paceline.run import Run
from paceline.runtime.execution import handle_of


def group(leader: int) -> list[int]:
    """The living processes of a group."""
    return [pid for pid, (state, _, their_group) in _processes().items() if their_group == leader and state != "Z"]


def living(pid: int, parent: int) -> bool:
    """Whether there is such a process, and it is a child of this one."""
    state, its_parent, _ = _read(pid)
    return state not in "ZX" and its_parent == parent


def _processes() -> dict[int, tuple[str, int, int]]:
    return {int(path.name): _read(int(path.name)) for path in Path("/proc").glob("[0-9]*")}


def _read(pid: int) -> tuple[str, int, int]:
    """State, parent and group of a process."""
    try:
        state, parent, its_group = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:3]
    except OSError:
        return "X", 0, 0
    return state, int(parent), int(its_group)


def left_of(driver: int) -> list[str]:
    """Shared memory, sockets and processes of a run whose driver had this number and has ended."""
    mark = f"paceline-{driver}-"
    left = [f"process {pid}" for pid in group(driver)]
    left += [str(path) for path in Path("/dev/shm").glob(f"*{mark}*")]
    left += [f"socket {line.split()[-1]}" for line in Path("/proc/net/unix").read_text().splitlines() if mark in line]
    for path in [each / "environ" for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            if mark.encode() in path.read_bytes():
                left.append(f"process {path.parent.name}")
        except OSError:
            continue
    return left


def used_once(run: Run) -> Iterator[str]:
    """What a trace shows that must not be: an update, or a peer's parameters, used twice or without having come."""
    arrived: dict[tuple[Node, int], set[Handle]] = {}
    used: dict[tuple[Node, int], Counter[Handle]] = {}
    for record in run.trace:
        process = record.node, record.incarnation
        came, went = arrived.setdefault(process, set()), used.setdefault(process, Counter())
        match record.event:
            case PushArrived(push=sent) | UpdateArrived(update=sent) | OfferArrived(offer=sent):
                came.add(sent.handle)
            case ReplyArrived():
                came.add(handle_of(record.event.reply))
        for action in record.actions:
            match action:
                case Apply(handles=handles) if record.node.role == "server":
                    went.update(handles)
                case Reduce(handles=handles):
                    went.update(handles)
                case Drop(handle=handle) if record.node.role == "peer" and handle.source != record.node.rank:
                    went[handle] += 1
    for process, went in used.items():
        if twice := [handle for handle, times in went.items() if times > 1]:
            yield f"{process[0]} used {twice[0]} twice"
        if unknown := set(went) - arrived[process]:
            yield f"{process[0]} used {unknown.pop()}, which never came"
