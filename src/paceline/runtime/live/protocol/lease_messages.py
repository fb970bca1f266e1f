"""The messages by which a worker leases samples: LeaseEvents to the driver, LeaseAnswer from it."""

from __future__ import annotations

from msgspec import Struct

from paceline.core.control.batch_balance import BatchRequested
from paceline.core.sample_dispatch import GrantLease, LeaseAcknowledged, LeaseRequested, LeaseReturned, SkipEpoch


class LeaseEvents(Struct, frozen=True, tag=True):
    """A worker's events for the dispatcher of one of its samplers: what it has settled, and perhaps a request.

    Samplers are numbered in the order in which a script makes them. Size and seed must be the same on every worker.
    With balanced batches `batches` goes with a request: the answer says how large the batches are to be.
    """

    rank: int
    incarnation: int
    sampler: int
    size: int
    seed: int
    events: tuple[LeaseRequested | LeaseAcknowledged | LeaseReturned, ...]
    batches: BatchRequested | None = None


class LeaseAnswer(Struct, frozen=True, tag=True):
    """The dispatcher's answer to a request, and the epoch it is for, which a joiner does not know."""

    sampler: int
    epoch: int
    answer: GrantLease | SkipEpoch
    batch: int | None = None
    """The samples of each batch, if batches are balanced."""
