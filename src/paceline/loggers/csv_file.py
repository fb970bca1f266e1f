"""Metrics as a CSV file, a line for each value: it opens in a spreadsheet, also while the run goes on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from paceline import private_files
from paceline.errors import ConfigError

HEADINGS = ("time_s", "updates", "metric", "value")


class CSVLogger:
    """Writes `metrics.csv` in the run's folder. What a resumed run logs is appended."""

    def __init__(self, folder: Path, config: dict[str, Any], options: dict[str, str]) -> None:
        if options:
            raise ConfigError("--log csv takes no options")
        path = folder / "metrics.csv"
        try:
            self.file = open(path, "a", newline="", encoding="utf-8", buffering=1, opener=private_files.opener)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--log csv: {path} cannot be written: {error.strerror}") from None
        self.writer = csv.writer(self.file, lineterminator="\n")
        if not self.file.tell():
            self.writer.writerow(HEADINGS)

    def log(self, time_s: float, updates: int, values: dict[str, float]) -> None:
        self.writer.writerows((f"{time_s:.6f}", updates, name, repr(value)) for name, value in values.items())

    def close(self) -> None:
        self.file.close()
