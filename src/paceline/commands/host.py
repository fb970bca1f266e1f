"""`paceline host`: a run that torchrun or Slurm has started, its options, and its driver.

    torchrun --nnodes 3 --nproc-per-node 1 -m paceline host --workers 4 train.py

Scripts that a launcher starts directly take the same options from the environment (`launcher_processes.py`).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import private_files, run_folder
from paceline.api import check_count
from paceline.commands.options import Flag, Maybe, WorkerStart
from paceline.commands.run import Live, Start, check_script
from paceline.commands.serve_join import read_ports, warn_insecure
from paceline.commands.terminal import console, print_plain
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.live.driver.driver import RunPlan
    from paceline.runtime.live.driver.run_plan import OpenRun
    from paceline.runtime.live.launchers.launcher_environment import Place

GRACE_S = 6.0
"""How long a run whose launcher ends it may take for its last checkpoint, and an agent to hear that it is over."""
LOCKED_S = 20.0


@dataclass(kw_only=True)
class Host(WorkerStart, Live):
    """Be one node of a run that torchrun or Slurm has started:

    torchrun --nnodes 3 --nproc-per-node 1 -m paceline host --workers 4 SCRIPT.py
    srun -N3 --ntasks-per-node=1 python -m paceline host --workers 4 SCRIPT.py

    The first node also has the run's driver and the servers. A worker that dies is started again by its node
    (--restarts), and the others go on meanwhile. Traffic between nodes is encrypted.
    """

    workers: int = 1
    """How many processes run the script on each node."""
    spread_servers: Flag = False
    """Servers run on all nodes, not only on the first."""
    interface: Maybe[str] = None
    """The network between the nodes, as eth1; if none, the one by which the first node is reached."""
    advertise: Maybe[str] = None
    """The address of the first node that the others are to use, if it is not its interface's."""
    ports: Maybe[str] = None
    """The ports that may be used, as 7000-7016: the first is the driver's, the others are for servers."""
    wire: str = "float32"
    """How floats travel to other nodes: float32 (as they are), bfloat16 or float16 (half the bytes), int8 (a quarter),
    int4 (a seventh), topk:share=0.01 (the largest only, a hundredth). All but the first with error feedback."""
    insecure: Flag = False
    """No keys and no encryption: whoever reaches a port takes part. Only in a network you trust."""

    def main(self, script: list[str], start: Start | None = None) -> int:
        """The node's agent, and beside rank 0 the driver."""
        from paceline.commands.launcher_processes import NodeAgent
        from paceline.runtime.live.launchers.launcher_environment import read_place
        from paceline.runtime.live.launchers.launcher_worker import DRIVE, start_child
        from paceline.runtime.live.system.process_setup import die_with

        place = read_place(os.environ)
        if place is None:
            raise ConfigError("paceline host is started by torchrun or srun; on one machine there is paceline run")
        check_script(script, "host")
        check_count("workers", self.workers)
        check_options(self)
        die_with(os.getppid(), signal.SIGTERM)
        driver = None
        if place.rank == 0:
            driver = start_child(DRIVE, [f"--host={json.dumps(asdict(self))}", *script], own_session=True)
        agent = NodeAgent(self, place, place.rank, place.size, driver)
        try:
            code = agent.start_workers(script)
        except BaseException:
            agent.end_driver()
            raise
        return max(code, agent.await_driver())

    # As the driver of a run.

    def drive(self, script: list[str], place: Place, agents: int, workers: int) -> int:
        """Do the run; `workers` in all come with so many agents."""
        from paceline.runtime.live.launchers.rendezvous import DriverThere, RendezvousStore

        self.place, self.agents, self.workers = place, agents, workers
        self.store = RendezvousStore(place, make=True)
        try:
            return self.run(script, self.before(script[0]))
        except ConfigError as error:
            self.store.put("driver", DriverThere(failed=str(error)))
            raise

    def before(self, script: str) -> Start | None:
        """The run's folder and checkpoint, if the launcher has started it before and there is one to go on from."""
        from paceline.runtime.live.driver.durability import find_start
        from paceline.runtime.live.launchers.rendezvous import FolderThere

        self.folder: Path | None = None
        if not self.place.attempt:
            return None
        noted = self.store.read("folder", FolderThere, keep_over_attempts=True)
        folder = self.usual_folder(script)
        if noted is not None and self.dir is None and Path(noted.path).parent == Path("runs").resolve():
            folder = Path(noted.path)  # anybody may write to the store: it chooses among the runs here, no more
        if folder is None or not (folder / run_folder.CONFIG).exists():
            return None
        self.folder = folder
        self.lock(folder)
        path = find_start(folder, self.durable or self.durable_fsync, None, print_plain)
        if path is None:
            return None
        console.print(f"attempt {self.place.attempt + 1}: going on from {path}", soft_wrap=True)
        return Start(folder, from_checkpoint=int(path.name))

    def usual_folder(self, script: str) -> Path | None:
        """Returns where this run is, if that is known without a note in the launcher's store."""
        if self.dir is not None:
            return Path(self.dir)
        if self.place.launcher == "Slurm":
            return Path("runs") / f"slurm-{self.place.name}-{Path(script).stem}"
        return None

    def make_folder(self, script: str) -> Path:
        from paceline.runtime.live.launchers.rendezvous import FolderThere

        if self.folder is not None:
            return self.folder  # it was begun, and has no checkpoint
        usual = self.usual_folder(script)
        if self.dir is None and usual is not None and not usual.exists():
            private_files.make_folder(usual)
            folder = usual
        else:
            folder = super().make_folder(script)
        self.lock(folder)
        self.store.put("folder", FolderThere(str(folder.resolve())), keep_over_attempts=True)
        return folder

    def lock(self, folder: Path) -> None:
        """The driver of the attempt before this one may still be writing its last checkpoint: wait for it."""
        self.locked = os.open(folder, os.O_RDONLY)
        until = time.monotonic() + LOCKED_S
        while True:
            try:
                fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ConfigError(f"the run in {str(folder)!r} is going on: another driver writes there") from None
                time.sleep(0.1)
            except OSError:
                return  # a file system without locks

    def plan(self, script: list[str]) -> RunPlan:
        from paceline.runtime.live.driver.remote_hosts import Meeting
        from paceline.runtime.live.messaging.remote_links import make_keys
        from paceline.runtime.live.protocol.configuration import MultihostOptions

        check_options(self)
        host, here = self.addresses(self.place)
        advertise = self.advertise or here
        first, last = read_ports(self.ports)
        keys = None if self.insecure else make_keys()
        if self.insecure:
            warn_insecure(host)
        plan = super().plan(script)
        return replace(
            plan,
            meeting=Meeting(host, first, advertise, keys, spread=self.spread_servers),
            multihost=MultihostOptions(host, advertise, (min(first + 1, last), last), not self.insecure, self.wire),
            opened=self.meet,
            care=replace(plan.care, grace_s=GRACE_S),
        )

    def meet(self, run: OpenRun) -> None:
        """Learn who will come, then say where to."""
        from paceline.runtime.live.launchers.rendezvous import AgentThere, DriverThere

        def still() -> None:
            if run.interrupts:
                raise KeyboardInterrupt

        hosts = run.hosts
        for number in range(self.agents):
            missing = f"still waiting for node {number} of {self.agents}"
            agent = self.store.wait_for(f"agent-{number}", AgentThere, still, partial(console.print, missing))
            if agent.key:
                hosts.enrol(agent.key, agent.token)
        keys = hosts.meeting.keys
        self.store.put("driver", DriverThere(hosts.address, keys.public if keys is not None else ""))

    def addresses(self, place: Place) -> tuple[str, str]:
        """Returns where to listen on this node, and the address the others reach it by."""
        from paceline.runtime.live.messaging.addresses import address_of, address_towards

        if self.interface is not None:
            address = address_of(self.interface)
            return address, address
        if place.nodes == 1:
            return "127.0.0.1", "127.0.0.1"
        return "0.0.0.0", address_towards(place.master, place.port)


def check_options(host: Host) -> None:
    from paceline.runtime.live.messaging.addresses import address_of
    from paceline.tensors.wire_precision import check_wire

    check_wire(host.wire)
    first, last = read_ports(host.ports)
    if last and last == first:
        raise ConfigError(f"ports={host.ports} is one port: the driver takes the first, servers need others")
    if host.interface is not None:
        address_of(host.interface)
    if host.spread_servers and (host.durable or host.durable_fsync):
        raise ConfigError("--durable keeps its logs on one machine's disk: not with --spread-servers")
