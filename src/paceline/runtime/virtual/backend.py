"""What the nodes of a simulation do with tensors: here, nothing, so that only times are simulated.

The nodes call a backend wherever a real run would compute, copy or step. `training.py` has backends that do it with
tensors; a run without them is the same run, event for event, and fast enough for 10 000 workers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.core.actions import Apply, Reduce
from paceline.core.messages import Handle

SLICE_BYTES = 20_000
"""What a gradient slice is said to weigh: a model of about 5 000 parameters."""

Process = tuple[int, int]
"""(rank, incarnation) of a worker or a peer."""


class Backend:
    """The backend without tensors, and the base of those with some. `rank` is that of a server or of a peer."""

    name: ClassVar[str] = "timing"
    has_tensors: ClassVar[bool] = False
    clips_mean = False

    def __init__(self, slice_bytes: tuple[int, ...] | None = None) -> None:
        self.slice_bytes = slice_bytes
        """What the slice of each shard weighs; `SLICE_BYTES` each if none."""
        self.updates = 0
        """How many steps have been taken, on all shards or by all peers."""

    def join(self, process: Process) -> None:
        """A worker or a peer comes."""

    def leave(self, process: Process) -> None:
        """A worker or a peer is gone, and what it held with it."""

    def read(self, process: Process, shard: int) -> None:
        """A worker is sent the parameters of a shard as they are now."""

    def compute(self, process: Process, iteration: int, samples: int) -> None:
        """A worker or a peer begins to compute a gradient on the parameters it has now, and on so many samples."""

    def begin_round(self, process: Process, iteration: int) -> None:
        """A worker or a peer begins a round of local steps with the parameters it has now."""

    def local_step(self, process: Process, iteration: int, step: int, samples: int) -> None:
        """It begins a step of its round, the `step`-th of all it does, on so many samples."""

    def abort(self, process: Process, iteration: int) -> None:
        """The computation was given up, or its process died."""

    def apply(self, rank: int, action: Apply) -> None:
        """Take a step of the optimizer."""
        self.updates += 1

    def drop(self, rank: int, handle: Handle) -> None:
        """Forget a gradient slice, or parameters that have come from another peer."""

    def significance(self, shard: int, handle: Handle) -> float | None:
        """|g| / |w| of a gradient slice. Without tensors nothing is significant."""
        return None

    def squared_norm(self, shard: int, handles: tuple[Handle, ...]) -> float:
        """The squared norm of the mean of some gradient slices."""
        return 0.0

    def snapshot(self, rank: int, handle: Handle) -> Any:
        """A copy of a peer's parameters, to be sent under this name."""

    def keep(self, rank: int, handle: Handle, values: Any) -> None:
        """Parameters have come to a peer from another one."""

    def reduce(self, rank: int, action: Reduce) -> None:
        """Average a peer's parameters with some that have come."""
