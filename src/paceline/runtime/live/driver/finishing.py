"""How a run comes to its end once all workers are gone: a last checkpoint, then the servers leave the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from paceline.core.control.worker_restarts import Outcomes
from paceline.errors import PacelineError
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.peer_results import keep_peers
from paceline.runtime.live.driver.results import keep_buffers
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.server_resizing import ServerResizing
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire


@dataclass(eq=False)
class Finishing:
    """Orders the end of the servers."""

    state: RunState
    servers: Servers
    resizing: ServerResizing
    checkpointer: Checkpointer | None
    outcomes: Outcomes
    folder: Path
    never_began: Callable[[], PacelineError]
    """Tells why nothing was trained."""
    say: Callable[[str], None]

    def finish(self) -> None:
        """All workers are gone: collect the parameters, as soon as that can be."""
        if not self.state.begun:
            raise self.never_began()
        if not self.outcomes.well and not self.outcomes.failures:
            self.outcomes.failures.extend(self.outcomes.losses)
        if not self.servers.all_configured or self.resizing.under_way:
            return  # a server is being restarted, or given its part
        if self.checkpointer is not None and not self._has_kept(self.checkpointer):
            return
        self.state.finishing = True
        self.servers.tell_all(wire.Finish())

    def _has_kept(self, checkpointer: Checkpointer) -> bool:
        """Orders the checkpoint at the end, once; returns whether none is under way. The servers end when it is
        whole: one that dies before has lost nothing."""
        if checkpointer.under_way is None and not checkpointer.has_ordered_final:
            try:
                keep_buffers(self.folder)
            except (OSError, SafetensorError) as error:
                self.say(f"WARNING: the checkpoint at the end has buffers as they were at the beginning: {error}")
            checkpointer.begin(final=True)
            if self.state.without_servers:
                keep_peers(checkpointer, self.state.model.layout, self.folder)
        return checkpointer.under_way is None
