"""What the driver does when somebody asks it to stop the run or to write a checkpoint, from another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.shutdown_signals import ShutdownSignals
from paceline.runtime.live.protocol import requests
from paceline.runtime.live.protocol.resizing_messages import Outcome


@dataclass(eq=False)
class Requests:
    """Takes requests, and answers each with what comes of it."""

    state: RunState
    interrupts: ShutdownSignals
    checkpointer: Checkpointer | None
    answer: Callable[[str, Outcome], None]

    def stop(self, message: requests.StopAsked) -> None:
        """Ends the run as Ctrl-C does, once."""
        if self.state.stopping or self.state.finishing:
            self.answer(message.requester, Outcome("the run is ending already", False))
            return
        self.interrupts.ask()
        self.answer(message.requester, Outcome("the run stops after the current iterations", False))

    def checkpoint(self, message: requests.CheckpointAsked) -> None:
        checkpointer = self.checkpointer
        if checkpointer is None:
            why = "this run keeps no folder, and so no checkpoints"
        elif self.state.without_servers:
            why = "a run without servers is checkpointed only at its end"
        elif not checkpointer.can_order():
            why = "it begins or ends, or its servers are being changed: ask again"
        else:
            under_way = checkpointer.under_way is not None
            checkpointer.begin_if_possible()
            text = "a checkpoint is under way already" if under_way else "a checkpoint is being written"
            self.answer(message.requester, Outcome(text, False))
            return
        self.answer(message.requester, Outcome(f"there is no checkpoint now: {why}", True))
