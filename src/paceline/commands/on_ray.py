"""`paceline run --on ray`: what is asked of a Ray cluster, in a user's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.commands.options import Folder, Maybe, WorkerStart
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.live.driver.driver import RunPlan
    from paceline.runtime.live.launchers.ray_cluster import Wanted, WorkerScript

INSTALL = "ray is not installed: pip install 'paceline[ray]'"
CHECKPOINT_S = 10.0
"""A run on Ray is checkpointed this often if nothing else is said: a server that is lost goes on from there."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Only with --on ray: Ray places each worker and each server, and starts it again on another node if its own is
    lost. Nodes need paceline and ray; they reach this machine and each other by TCP, with keys (docs/cluster.md)."""

    ray_address: str = "auto"
    """The cluster: auto, the one this machine belongs to, or else one begun here for this run; local, always the
    latter; HOST:PORT of a head node."""
    cpus_per_worker: float = 1.0
    """What Ray sets aside for each worker. It may be a fraction: Ray counts, it does not enforce."""
    gpus_per_worker: float = 0.0
    """What Ray sets aside for each worker of GPUs; the script sees its own in CUDA_VISIBLE_DEVICES."""
    cpus_per_server: float = 1.0
    """What Ray sets aside for each server."""
    placement: Literal["spread", "pack"] = "spread"
    """spread: over as many nodes as there are; pack: on as few as possible."""
    place_timeout_s: float = 60.0
    """Give up if the cluster has no room for so long. One that grows by itself may need minutes."""
    working_dir: Folder = None
    """A folder Ray brings to all nodes, in which the script runs; without one the script must be at the same path
    on all nodes."""
    ports: Maybe[str] = None
    """The ports servers may take on their nodes, as 7001-7016; any free ones if none."""
    wire: str = "float32"
    """How floats travel to other nodes: float32 (as they are), bfloat16 or float16 (half the bytes), int8 (a quarter),
    int4 (a seventh), topk:share=0.01 (the largest only, a hundredth). All but the first with error feedback."""

    def check(self) -> None:
        for name in ("cpus_per_worker", "gpus_per_worker", "cpus_per_server"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name}={value:g} is out of range: 0 or more")
        for name in ("cpus_per_worker", "cpus_per_server", "place_timeout_s"):
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"{name}={value:g} is out of range: more than 0")

    def wanted(self, plan: RunPlan) -> Wanted:
        from paceline.runtime.live.launchers.ray_cluster import Wanted

        worker = {"CPU": self.cpus_per_worker}
        if self.gpus_per_worker:
            worker["GPU"] = self.gpus_per_worker
        server = {"CPU": self.cpus_per_server}
        return Wanted(plan.members, worker, server, self.placement.upper(), self.place_timeout_s)

    def worker_script(self, script: list[str]) -> WorkerScript:
        """Returns the script as it is found on the nodes."""
        from paceline.runtime.live.launchers.ray_cluster import WorkerScript

        path = Path(script[0]).resolve()
        if self.working_dir is None:
            return WorkerScript(str(path), tuple(script[1:]), str(Path.cwd()))
        folder = Path(self.working_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--working-dir {self.working_dir} is no folder")
        if not path.is_relative_to(folder):
            raise ConfigError(
                f"the script {script[0]} is not in --working-dir {self.working_dir}, which is what nodes get"
            )
        return WorkerScript(str(path.relative_to(folder)), tuple(script[1:]), "")


@contextmanager
def placed(plan: RunPlan, options: RayOptions, start: WorkerStart, script: list[str]) -> Iterator[RunPlan]:
    """Yields the plan with its processes on a Ray cluster, for as long as it lasts."""
    from paceline.commands.serve_join import read_ports
    from paceline.runtime.live.driver.remote_hosts import Meeting
    from paceline.runtime.live.messaging.addresses import EVERYWHERE
    from paceline.runtime.live.messaging.remote_links import make_keys
    from paceline.runtime.live.protocol.configuration import MultihostOptions
    from paceline.tensors.wire_precision import check_wire

    options.check()
    check_wire(options.wire)
    multihost = MultihostOptions(EVERYWHERE, "", read_ports(options.ports), True, options.wire)
    try:
        from paceline.runtime.live.launchers.ray_cluster import OnRay, own_address
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(INSTALL) from None
    folder = options.working_dir
    worker_script = replace(
        options.worker_script(script),
        policy=str(plan.policy) if plan.policy is not None else None,
        preload=start.preload,
        fresh=start.fresh,
    )
    with OnRay(options.wanted(plan), worker_script, options.ray_address, folder) as on_ray:
        away_s = options.place_timeout_s
        meeting = Meeting(EVERYWHERE, 0, own_address(), make_keys(), spread=True, away_s=away_s)
        yield replace(plan, meeting=meeting, multihost=multihost, opened=on_ray.opened, tick=on_ray.tick)
