"""Where logged metrics go besides the run's folder: `paceline run --log csv tensorboard`, and plug-ins of others.

A plug-in is a class, named by an entry point of the group `paceline.loggers`. It is made with the run's folder, the
run's configuration, and the options that stand after its name (`--log mine:project=digits`), before the run begins; it
raises `paceline.ConfigError` for what it cannot take.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

GROUP = "paceline.loggers"
OURS = {
    "csv": ("paceline.loggers.csv_file", "CSVLogger"),
    "tensorboard": ("paceline.loggers.tensorboard", "TensorBoardLogger"),
}


class MetricsLogger(Protocol):
    """What takes the metrics of a run, in the driver's process."""

    def log(self, time_s: float, updates: int, values: dict[str, float]) -> None:
        """Takes what was logged at one moment, which must not take long."""

    def close(self) -> None:
        """The run has ended."""


MakeLogger = Callable[[Path, dict[str, Any], dict[str, str]], MetricsLogger]


class Loggers:
    """All the loggers of a run. One that fails is left out from then on, and the training goes on."""

    def __init__(self, loggers: dict[str, MetricsLogger]) -> None:
        self.loggers = loggers

    def log(self, time_s: float, updates: int, values: dict[str, float]) -> None:
        self._each(lambda each: each.log(time_s, updates, values))

    def close(self) -> None:
        self._each(lambda each: each.close())

    def _each(self, call: Callable[[MetricsLogger], None]) -> None:
        for name, each in list(self.loggers.items()):
            try:
                call(each)
            except Exception as error:  # a plug-in of others must not end the run
                logger.warning(f"--log {name} ends here, the training goes on: {type(error).__name__}: {error}")
                del self.loggers[name]


def find(texts: Sequence[str]) -> dict[str, tuple[MakeLogger, dict[str, str]]]:
    """Returns what makes each of these loggers, and its options; raises `ConfigError` for one that is not there."""
    found: dict[str, tuple[MakeLogger, dict[str, str]]] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        if name in found:
            raise ConfigError(f"--log names {name} twice")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        if not all(key and equals for key, equals, _ in pairs):
            raise ConfigError(f"--log {text!r} cannot be read: NAME, or NAME:key=value,key=value")
        found[name] = (_maker(name), {key: value for key, _, value in pairs})
    return found


def _maker(name: str) -> MakeLogger:
    if name in OURS:
        module, cls = OURS[name]
        made: MakeLogger = getattr(importlib.import_module(module), cls)
        return made
    plugins: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=GROUP)}
    if name not in plugins:
        raise ConfigError(f"there is no logger {name!r} (there are: {', '.join(sorted({*OURS, *plugins}))})")
    try:
        made = plugins[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the logger {name!r}, {plugins[name].value}, cannot be loaded: {error}") from None
    return made


@contextlib.contextmanager
def opened(
    makers: dict[str, tuple[MakeLogger, dict[str, str]]], folder: Path, config: dict[str, Any]
) -> Iterator[Loggers]:
    """Yields the loggers of a run, and closes them."""
    loggers = Loggers({})
    try:
        for name, (make, options) in makers.items():
            loggers.loggers[name] = make(folder, config, options)
        yield loggers
    finally:
        loggers.close()
