"""What a job may say about its batches, checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.policy import Policy
from paceline.counts import check_count
from paceline.errors import ConfigError
from paceline.runtime.balance import check_balance
from paceline.sample_order import SHUFFLED, Batch, BatchSizes


def check_batch(batch: int | Sequence[int], workers: int) -> Batch:
    """Returns the samples of a gradient: one number, or one for each worker."""
    if not isinstance(batch, Sequence):
        return check_count("batch", batch)
    if len(batch) != workers:
        raise ConfigError(f"batch has {len(batch)} sizes, there are {workers} workers: one for each")
    return tuple([check_count("batch", each) for each in batch])


def batch_sizes(batch: Batch, balance: bool, policy: Policy, shards: str, by_layer: bool) -> Batch | BatchSizes:
    """Returns what a step of each worker uses; refuses to balance what cannot be."""
    if by_layer and (balance or not isinstance(batch, int)):
        raise ConfigError("by_layer takes batches of one size: layers are timed alike")
    if not balance:
        return batch
    check_balance(policy)
    if not isinstance(batch, int):
        raise ConfigError("balance=True finds a size for each worker: give batch as one number")
    if shards != SHUFFLED:
        raise ConfigError(f"balance=True needs samples that any worker may take, not shards={shards}")
    return BatchSizes(batch, balance=True)
