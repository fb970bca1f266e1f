"""Metrics for TensorBoard: event files in the run's folder, over the updates of the run."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


class TensorBoardLogger:
    """Writes `tensorboard/` in the run's folder: `tensorboard --logdir runs` shows several runs together."""

    def __init__(self, folder: Path, config: dict[str, Any], options: dict[str, str]) -> None:
        if options:
            raise ConfigError("--log tensorboard takes no options")
        if find_spec("tensorboard") is None:
            raise ConfigError("--log tensorboard needs tensorboard: pip install 'paceline[tensorboard]'")
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), flush_secs=5)
        self.began_s: float | None = None

    def log(self, time_s: float, updates: int, values: dict[str, float]) -> None:
        if self.began_s is None:
            self.began_s = time.time() - time_s
        for name, value in values.items():
            self.writer.add_scalar(name, value, updates, self.began_s + time_s)

    def close(self) -> None:
        self.writer.close()
