"""Workers that read and push layer by layer (Chen et al. 2016, Figure 1 and Table 1).

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
from typing import Any

from paceline.core.actions import Send
from paceline.core.events import ParametersArrived
from paceline.core.messages import Notify, Pull
from paceline.runtime.virtual.worker import VirtualWorker

BACK = 2.0
"""How many times as long as forward the way back takes."""


class LayerwiseWorker(VirtualWorker):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.layers = len(self.slice_bytes)
        self.layer_s = 0.0
        """Seconds the present iteration needs for one layer, going forward."""
        self.back_at = 0.0
        """When the last backward pass is over."""
        self.to_pull: deque[Send] = deque()
        """Pulls that wait for the layers below."""
        self.reading = False
        """Whether a layer is being read or computed, so that the next must wait."""
        self.compute_s = self.top_layer_s

    def send(self, action: Send) -> None:
        """A push leaves when the way back has come down to its layer, a pull when its turn comes.

        The machine orders the bottom layer's push first, so the end of the way back is known before any pull.
        """
        now = self.engine.now
        if isinstance(action.message, Notify):
            self.dispatch(action)
        elif not isinstance(action.message, Pull):
            leaves_at = now + (self.layers - 1 - action.to.rank) * BACK * self.layer_s
            self.back_at = max(self.back_at, leaves_at)
            self.at_own_time(leaves_at, self.dispatch, action)
        elif action.to.role == "scheduler":
            self.at_own_time(self.back_at, self.dispatch, action)
        else:
            self.to_pull.append(action)
            if not self.reading:
                self.reading = True
                self.at_own_time(max(now, self.back_at), self.begin_forward)

    def begin_forward(self, _: None) -> None:
        self.layer_s = self.duration() / (self.layers * (1 + BACK))
        self.read_next(None)

    def read_next(self, _: None) -> None:
        if self.to_pull:
            self.dispatch(self.to_pull.popleft())
        else:
            self.reading = False

    def dispatch(self, action: Send) -> None:
        if self.alive:
            super().send(action)

    def take_parameters(self, event: ParametersArrived) -> None:
        """An answer: the layer is computed, then the next one is read."""
        if self.to_pull:
            self.at_own_time(self.engine.now + self.layer_s, self.read_next)
        else:
            self.reading = False
        super().take_parameters(event)

    def top_layer_s(self) -> float:
        """How long it takes, when all parameters are there, to compute the top layer, there and back."""
        return (1 + BACK) * self.layer_s
