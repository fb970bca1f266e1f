"""The norm of a mean over all shards: what clipping a mean needs, and no shard knows alone.

With `clip_mean` the servers scale the mean gradient of an iteration down to a norm, as `clip_grad_norm_` does in one
process. Each shard has a slice of that mean, so its own part of the norm. The reducer adds the parts up:

    shard      has everything that iteration V waits for: measures its slice of the mean, and reports the squared norm
    reducer    once every shard has reported its part of V, or that it has none: sends the norm to those who asked
    shard      steps on the mean, scaled, and V rises

A single shard knows the norm by itself and needs no reducer.

What keeps it harmless. Until the norm arrives, a shard goes on to answer and to park as before: its V has not risen,
and only what comes for V now is late. So a worker that another shard waits for is not held up here: if it joins, it is
answered, computes V and pushes it to the shard that expects it. A shard whose V rises without a step reports that too;
so does one that starts at a later iteration, after a checkpoint or a change of servers. The reducer does not wait for a
shard that has reported more than V. The report of a shard that is killed, or the answer to it, may be lost: after its
restart the shard comes to V again and reports again, and the reports of the others on V are kept until all have
reported more.
"""

from __future__ import annotations

from math import sqrt

from paceline.core.actions import Send
from paceline.core.events import ServersChanged, SliceNormArrived
from paceline.core.machine import Machine, require
from paceline.core.messages import MeanNorm, Node

REDUCER = Node("reducer", 0)


class NormReducer(Machine):
    """Adds up the squared norms that the shards report for the same iteration."""

    def __init__(self, servers: int) -> None:
        super().__init__()
        self.said = [-1] * servers
        """The largest iteration each shard has reported on."""
        self.squared: dict[int, dict[int, float]] = {}
        """iteration -> shard -> the squared norm of its slice of the mean."""
        self.asking: dict[int, int] = {}
        """shard -> the iteration whose norm it waits for."""

    def on_slice_norm_arrived(self, event: SliceNormArrived) -> None:
        shard, iteration, squared = event.norm.shard, event.norm.iteration, event.norm.squared
        if not 0 <= shard < len(self.said):
            return  # it was removed
        self.said[shard] = max(self.said[shard], iteration)
        if squared is not None:
            self.squared.setdefault(iteration, {})[shard] = squared
            self.asking[shard] = iteration

    def on_servers_changed(self, event: ServersChanged) -> None:
        """Changes the number of shards. It happens when no gradient is held, so no shard is asking."""
        servers = len(event.nbytes)
        self.said = [*self.said[:servers], *[event.V - 1] * (servers - len(self.said))]
        self.asking.clear()

    def settle(self) -> None:
        """Answers those who ask for an iteration that every shard has reported on."""
        heard = min(self.said)
        for shard, iteration in sorted(self.asking.items()):
            if iteration <= heard:
                del self.asking[shard]
                parts = self.squared[iteration]
                norm = sqrt(sum(parts[each] for each in sorted(parts)))
                self.actions.append(Send(Node("server", shard), MeanNorm(iteration, norm)))
        for iteration in [each for each in self.squared if each < heard]:
            del self.squared[iteration]

    def check(self) -> None:
        heard = min(self.said)
        for shard, iteration in self.asking.items():
            require(iteration > heard, f"shard {shard} waits for the norm of {iteration}, all have said {heard}")
