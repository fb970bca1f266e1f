"""Loaders that others have made, with a `paceline.Sampler` in place of the sampler they came with."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any, cast

from torch.utils import data

from paceline.sampling import BatchSampler, Sampler
from paceline.session import world

logger = logging.getLogger(__name__)

OWN = (data.RandomSampler, data.SequentialSampler)
"""The samplers that a loader makes for itself, which can be replaced."""


def deal(
    loader: data.DataLoader[Any], seed: int = 0, batches: int = 1, looks_ahead: bool = False
) -> data.DataLoader[Any]:
    """Has the samples of a loader dealt among the workers, and returns it.

    A step uses so many of its batches. If the loader looks ahead of the loop, what a step uses is what is in these.
    """
    drawn = loader.batch_sampler
    sampler = getattr(drawn, "sampler", None)
    if isinstance(sampler, Sampler) or isinstance(drawn, BatchSampler):
        return loader
    if not isinstance(drawn, data.BatchSampler) or not isinstance(sampler, OWN):
        if world().size > 1:
            which = type(sampler if sampler is not None else loader.dataset).__name__
            logger.warning(
                f"WARNING: worker {world().rank}: each worker draws from its own {which}: a paceline.Sampler would "
                "deal the data among them"
            )
        return loader
    per_step = drawn.batch_size * batches if looks_ahead else None
    drawn.sampler = Sampler(cast(Sized, loader.dataset), seed=seed, per_step=per_step)
    return loader
