"""How a peer's training ends, and then its process: what it leaves for the average, and how long others need it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.core.adpsgd_peer import NOBODY, ADPSGDPeer
from paceline.runtime.live.peer.event_loop import IDLE_S, EventLoop, MembershipState
from paceline.runtime.live.peer.peer_executor import PeerExecutor
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage.final_parameters import final_path, write_final
from paceline.runtime.live.trainer.model_description import ModelDescription, leave_buffers
from paceline.runtime.live.trainer.participation import Participation
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.tensors import state


class FinalValues:
    """What a peer leaves for the average: its parameters, its buffers, and its optimizer's state if that is wanted."""

    def __init__(
        self, run: RunConnection, model: ModelDescription, inner: torch.optim.Optimizer, executor: PeerExecutor
    ) -> None:
        self.run = run
        self.model = model
        self.inner = inner
        self.executor = executor

    def write(self, iteration: int) -> None:
        """Writes them as they are now."""
        run, model = self.run, self.model
        leave_buffers(model.buffers, run.folder, run.rank, run.incarnation)
        learned = state.from_torch(self.inner, model.tensors, model.layout) if run.config.keeps_state else {}
        path = final_path(run.folder, run.rank, run.incarnation)
        write_final(path, self.executor.parameters.fetch(), learned, iteration)
        self.executor.changed = False


class Departure:
    """What a peer does when its training is over."""

    def __init__(
        self,
        events: EventLoop,
        participation: Participation,
        final: FinalValues,
        iteration: Callable[[], int],
    ) -> None:
        self.events = events
        self.participation = participation
        self.final = final
        self.iteration = iteration

    def retire(self) -> None:
        """Leaves what others count on; the script goes on, and `stay` is still to come."""
        self.participation.leases.report()
        self.final.write(self.iteration())
        self._say_done(retires=True)

    def stay(self) -> None:
        """The script has ended: hears the neighbours until nobody needs this peer."""
        self.final.write(self.iteration())
        run = self.final.run
        if self.events.membership is MembershipState.MEMBER:
            self.begin_leaving()
        if self.events.membership is MembershipState.LEAVING:
            self._say_done(retires=False)
        while self.events.is_leaving:
            self.events.hear(IDLE_S)
        if self.final.executor.changed:
            self.final.write(self.iteration())
            run.send(wire.Leave(run.rank, run.incarnation))

    def begin_leaving(self) -> None:
        """From now on it is expected that a view does not name this peer."""
        if self.events.membership is MembershipState.MEMBER:
            self.events.membership = MembershipState.LEAVING

    def _say_done(self, retires: bool) -> None:
        """Tells the driver that this peer is done.

        An offer that is out is answered before, and neighbours on other hosts have all that was sent to them: who
        hears that this peer is done waits for nothing more of it.
        """
        run = self.final.run
        while not self._is_done() and self.events.is_leaving and not self.participation.gives_up:
            self.events.hear(IDLE_S)
        run.send(wire.Leave(run.rank, run.incarnation, self.iteration(), stays=True, retires=retires))

    def _is_done(self) -> bool:
        machine = self.events.runner.machine
        offers = isinstance(machine, ADPSGDPeer) and machine.offered != NOBODY
        return not offers and self.events.neighbours.all_arrived
