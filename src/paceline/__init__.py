"""paceline trains PyTorch models on machines of unequal speed: who waits for whom is a policy.

In a training script:

    paceline.init()
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ssp:staleness=3")
    loader = DataLoader(data, batch_size=32, sampler=paceline.Sampler(data))

`paceline run --workers 4 --servers 2 train.py` starts it in several processes; without that it trains alone. `log`
records metrics, `stop` ends the run, `barrier` waits for the other workers. The same policy runs in virtual time
(`simulate`) and in real processes (`launch`, `paceline run`); both return a `Run`.

Names are imported when they are first used: torch takes seconds, and `paceline --help` does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import zipline
    from paceline.api import launch, simulate
    from paceline.cluster import Cluster
    from paceline.core.policy import Policy
    from paceline.core.trace import Trace
    from paceline.errors import ConfigError, PacelineError, RunFailed
    from paceline.optim import Optimizer
    from paceline.policies import ASP, BSP, SSP, Backup
    from paceline.run import Run
    from paceline.sampling import BatchSampler, Sampler
    from paceline.session import barrier, init, log, stop
    from paceline.several_optimizers import optimizers

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "Backup",
    "BatchSampler",
    "Cluster",
    "ConfigError",
    "Optimizer",
    "PacelineError",
    "Policy",
    "Run",
    "RunFailed",
    "Sampler",
    "Trace",
    "barrier",
    "init",
    "launch",
    "log",
    "optimizers",
    "simulate",
    "stop",
    "zipline",
]

_HOMES = {
    "api": ("launch", "simulate"),
    "cluster": ("Cluster",),
    "core.policy": ("Policy",),
    "core.trace": ("Trace",),
    "errors": ("ConfigError", "PacelineError", "RunFailed"),
    "optim": ("Optimizer",),
    "policies": ("ASP", "BSP", "SSP", "Backup"),
    "run": ("Run",),
    "sampling": ("BatchSampler", "Sampler"),
    "session": ("barrier", "init", "log", "stop"),
    "several_optimizers": ("optimizers",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(importlib.import_module(f"paceline.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in __all__:
        return importlib.import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
