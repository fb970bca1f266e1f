"""How a server comes into the run: it is told of keys, configured with its part, and its clients are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.durability import Durability
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.script_barrier import ScriptBarrier
from paceline.runtime.live.driver.server_placement import ServerPlacement
from paceline.runtime.live.driver.server_resizing import ServerResizing
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire
from paceline.tensors.assignment import initial


@dataclass(eq=False)
class ServerStartup:
    """Configures servers when the model is known, and each that starts later."""

    servers: Servers
    state: RunState
    roster: Roster
    messenger: Messenger
    keys: KeyRegistry
    durability: Durability
    checkpointer: Checkpointer | None
    resizing: ServerResizing
    barrier: ScriptBarrier
    health: HealthMonitor
    placement: ServerPlacement

    def configure_all(self) -> None:
        """Tell all what they are to hold, at the beginning."""
        self.servers.assignment = initial(self.state.model.layout, self.servers.count)
        self.durability.begin(self.servers.count)
        for shard in range(self.servers.count):
            self._configure(shard)

    def _configure(self, shard: int) -> None:
        model, hyper = self.state.model, self.health.hyper
        optimizer = model.optimizer
        if hyper is not None:  # a server that is restarted goes on with what schedulers have changed
            optimizer = structs.replace(optimizer, groups=hyper)
        path, every = None, None
        if self.checkpointer is not None:
            path, every = self.checkpointer.last, self.checkpointer.checkpointing.every_updates
        configure = wire.Configure(
            str(model.policy), model.layout, self.servers.assignment, optimizer,
            self.state.epoch_s if self.state.begun else None,
            str(path) if path is not None else None, self.resizing.reslice_for(shard), every,
            self.durability.order_for(shard), self.placement.device_for(shard, self.state.begun),
        )  # fmt: skip
        self.servers.tell(shard, configure)

    def ready(self, ready: wire.Ready) -> None:
        servers, shard = self.servers, ready.shard
        if ready.endpoint.incarnation != servers.incarnations[shard]:
            return  # its process is gone, and another was started in its place
        servers.endpoints[shard] = ready.endpoint
        if not ready.configured:
            servers.there.add(shard)
            self.keys.tell(shard)
            if servers.assignment:  # the others were told what they hold
                self._configure(shard)
            return
        servers.configured.add(shard)
        if ready.problem:
            self.placement.take_problem(shard, ready.problem)
        if self.state.begun:
            view = self.roster.view()
            servers.tell(shard, wire.NewView(view))
            self.barrier.tell_server(shard)
            if self.resizing.taking:
                return  # the workers are told of all servers together
            for rank, incarnation in view.members:
                self.messenger.to_worker(rank, incarnation, wire.ServerRestarted(shard, ready.endpoint))
            if self.state.finishing:  # it was asked to, and died
                servers.tell(shard, wire.Finish())
