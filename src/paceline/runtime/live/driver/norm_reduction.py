"""The reducer of a live run whose servers clip the mean gradient: a machine in the driver's process.

Servers have a connection to the driver anyhow: the norms of their slices come that way, and the norm of all goes back.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from paceline.core.actions import Send, SetTimer
from paceline.core.events import ServersChanged, SliceNormArrived
from paceline.core.messages import MeanNorm, SliceNorm
from paceline.core.norm_reducer import REDUCER, NormReducer
from paceline.runtime.execution import MachineRunner, NoSuchAction
from paceline.runtime.live.protocol import wire


class NormReduction:
    """Carries out the reducer's actions."""

    def __init__(
        self, servers: int, now: Callable[[], float], tell_server: Callable[[int, wire.ToServer], None]
    ) -> None:
        self.now = now
        self.tell_server = tell_server
        self.runner = MachineRunner(REDUCER, 0, NormReducer(servers), self, None)

    def hear(self, message: wire.Measured) -> None:
        norm = SliceNorm(message.shard, message.iteration, message.squared)
        self.runner.deliver(SliceNormArrived(self.now(), norm))

    def change_servers(self, event: ServersChanged) -> None:
        self.runner.deliver(structs.replace(event, at=self.now()))

    def send(self, action: Send) -> None:
        if not isinstance(action.message, MeanNorm):
            raise NoSuchAction(f"the reducer cannot {action}")
        self.tell_server(action.to.rank, wire.Reduced(action.message))

    def set_timer(self, action: SetTimer) -> None:
        raise NoSuchAction(f"the reducer cannot {action}")
