"""How a run turns out to be one without servers, and what its peers begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file

from paceline import peer_checks
from paceline.core.policy import PeerPolicy
from paceline.core.topology import Topology
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.processes import Children
from paceline.runtime.live.driver.remote_hosts import RemoteHosts
from paceline.runtime.live.driver.run_plan import RunPlan
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.storage import checkpoint, shared_memory
from paceline.tensors import state


@dataclass(eq=False)
class PeerSetup:
    """Lets go what was started for a policy with servers, and has the peers resume from a checkpoint."""

    plan: RunPlan
    folder: Path
    children: Children
    hosts: RemoteHosts | None
    servers: Servers
    checkpointer: Checkpointer | None
    say: Callable[[str], None]
    graph: Topology | None = None
    """As it was when the run began: a file may be written anew."""
    before: int = 0
    """Iterations of the run that this one goes on from."""

    def prepare(self, policy: PeerPolicy) -> None:
        """The policy is known, and has no servers: what was started for one that has is let go."""
        plan, members = self.plan, self.plan.members
        peer_checks.refuse_servers(policy, plan.servers_asked, plan.slicing)
        peer_checks.check_live_scenario(policy, plan.cluster, members)
        if plan.multihost is not None:
            peer_checks.check_wire(policy, plan.multihost.wire)
        self.graph = policy.topology(members.workers)
        if warning := peer_checks.warning_of(policy, members.workers):
            self.say(f"warning: {warning}")
        for child in [child for child in self.children.values() if child.role == "server"]:
            if self.hosts is not None:
                self.hosts.release(child)
            self.children.dismiss(child)
        self.servers.remove_all()
        if self.checkpointer is not None:
            self.checkpointer.checkpointing.check(policy)
            if self.checkpointer.checkpointing.resume and self.checkpointer.last is not None:
                self._resume(self.checkpointer.last)

    def _resume(self, path: Path) -> None:
        """Have all begin with what is in a checkpoint instead of what worker 0 has left."""
        manifest = checkpoint.read(path)
        values, learned = checkpoint.load_part(path, manifest, ((0, manifest.layout.numel),))
        shared_memory.attach(self.folder / shared_memory.WHOLE, manifest.layout).copy_(values)
        save_file(state.join([learned], manifest.layout), self.folder / shared_memory.INITIAL_STATE)
        self.before = max(shard.iteration for shard in manifest.shards)

    def placed(self, policy: PeerPolicy) -> PeerPolicy:
        """The policy with its graph laid out by hosts, if it is to be: ranks that follow one another on one host are
        together."""
        where = self.hosts.home if self.hosts is not None else {}
        homes = [where[rank].name if rank in where else b"" for rank in range(self.plan.members.workers)]
        placed = policy.placed(tuple(len(list(together)) for _, together in groupby(homes)))
        if placed != policy:
            self.say(f"the graph is laid out by host: {placed}")
        return placed
