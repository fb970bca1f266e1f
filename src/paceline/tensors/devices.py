"""The devices on which virtual workers compute: the processor, or a GPU by CUDA's name."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import ConfigError

CPU = torch.device("cpu")
NAMES = re.compile(r"cpu|cuda(:\d{1,3})?")
NOT_DETERMINISTIC = re.compile(r"(.+?) does not have a deterministic implementation")
WORKSPACE, WORKSPACE_SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What cuBLAS must find in the environment when it starts, so that it gives the same bits on any stream."""


def check_device(name: str) -> torch.device:
    """Returns the device of this name; refuses one that is not here."""
    if not isinstance(name, str) or not NAMES.fullmatch(name):
        raise ConfigError(f"unknown device {name!r} (known: cpu, cuda, cuda:0, cuda:1, ...)")
    device = torch.device(name)
    if device == CPU:
        return device
    if not torch.backends.cuda.is_built():
        raise ConfigError(f"device={name}: torch {torch.__version__} was built without CUDA")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        there = f"it has {count}" if count else "torch finds none"
        raise ConfigError(f"device={name}: this machine has no such GPU, {there}")
    return torch.device("cuda", device.index or 0)


@contextmanager
def deterministic(device: torch.device) -> Iterator[set[str]]:
    """Has torch compute on a GPU, meanwhile, by algorithms that give the same bits each time.

    It yields the names of the operations met so far that have no such algorithm. On the CPU nothing is changed.
    """
    met: set[str] = set()
    if device == CPU:
        yield met
        return
    os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)
    settings: Any = torch.utils.deterministic
    fills, benchmark = settings.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    show = warnings.showwarning

    def note(message: Warning | str, *rest: object) -> None:
        found = NOT_DETERMINISTIC.match(str(message))
        if found:
            met.add(found[1])
        else:
            show(message, *rest)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=NOT_DETERMINISTIC.pattern)
        warnings.showwarning = note  # type: ignore[assignment]
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = False  # nothing is read that was not written
            torch.backends.cudnn.benchmark = False
            yield met
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
            settings.fill_uninitialized_memory = fills
            torch.backends.cudnn.benchmark = benchmark
