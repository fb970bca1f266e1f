"""What a person asks the driver of a run that goes on for, besides other servers (`resizing_messages.Want`).

`paceline stop`, `paceline checkpoint` -> driver; and back: `resizing_messages.Outcome`
"""

from __future__ import annotations

from msgspec import Struct


class StopAsked(Struct, frozen=True, tag=True):
    """The run is to end in order, as after Ctrl-C."""

    requester: str


class CheckpointAsked(Struct, frozen=True, tag=True):
    """A checkpoint is to be written now."""

    requester: str
