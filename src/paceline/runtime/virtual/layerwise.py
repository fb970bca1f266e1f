"""Workers that read and push layer by layer (004, Figure 1 and Table 1).

Parameters are read in the forward pass, from the bottom up, each layer when the pass reaches it; gradients are sent
in the backward pass, from the top down, each when it is there. The bottom layer is thus read first and sent last, and
has the stalest gradients. One shard holds one layer, so what a shard sees is what its layer sees.

The machine is the same as ever; only the sends of one step leave at different times. After a backward pass it orders
a push and a pull for every shard: the pushes leave as the pass comes down, then the pulls one after the other, each
when the layer below has been answered and computed. When the top layer has been answered the machine orders to
compute, and what is left of the iteration is the top layer itself, up and down.

Every layer takes equally long; going back takes twice as long as going forward, as is usual.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from paceline.core.actions import Send
from paceline.core.events import Event, ParametersArrived
from paceline.core.messages import Notify, Pull
from paceline.runtime.virtual.nodes import VirtualWorker

if TYPE_CHECKING:
    from paceline.runtime.virtual.simulation import Simulation

BACK = 2.0
"""How many times as long as forward the way back takes."""


class LayerwiseWorker(VirtualWorker):
    def __init__(self, simulation: Simulation, rank: int, incarnation: int) -> None:
        super().__init__(simulation, rank, incarnation)
        self.layers = len(simulation.shards)
        self.layer_s = 0.0
        """Seconds the present iteration needs for one layer, going forward."""
        self.back_at = 0.0
        """When the last backward pass is over."""
        self.to_pull: deque[Send] = deque()
        """Pulls that wait for the layers below."""
        self.reading = False
        """Whether a layer is being read or computed, so that the next must wait."""

    def send(self, action: Send) -> None:
        """A push leaves when the way back has come down to its layer, a pull when its turn comes.

        The machine orders the bottom layer's push first, so the end of the way back is known before any pull.
        """
        engine = self.simulation.engine
        if isinstance(action.message, Notify):
            self.dispatch(action)
            return
        if not isinstance(action.message, Pull):
            leaves_at = engine.now + (self.layers - 1 - action.to.rank) * BACK * self.layer_s
            self.back_at = max(self.back_at, leaves_at)
            self.at_own_time(leaves_at, lambda: self.dispatch(action))
            return
        if action.to.role == "scheduler":
            self.at_own_time(self.back_at, lambda: self.dispatch(action))
            return
        self.to_pull.append(action)
        if not self.reading:
            self.reading = True
            self.at_own_time(max(engine.now, self.back_at), self.begin_forward)

    def begin_forward(self) -> None:
        self.layer_s = self.duration() / (self.layers * (1 + BACK))
        self.read_next()

    def read_next(self) -> None:
        if self.to_pull:
            self.dispatch(self.to_pull.popleft())
        else:
            self.reading = False

    def dispatch(self, action: Send) -> None:
        if self.alive:
            super().send(action)

    def tell(self, event: Event) -> None:
        """An answer: the layer is computed, then the next one is read."""
        if isinstance(event, ParametersArrived):
            if self.to_pull:
                self.at_own_time(self.simulation.engine.now + self.layer_s, self.read_next)
            else:
                self.reading = False
        super().tell(event)

    def compute_s(self) -> float:
        """What is left when all parameters are there: the top layer, there and back."""
        return (1 + BACK) * self.layer_s
