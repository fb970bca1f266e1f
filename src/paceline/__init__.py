"""paceline trains PyTorch models on machines of unequal speed: who waits for whom is a policy.

The same policy object runs in virtual time (`simulate`) and in real processes (`launch`, `paceline run`).
"""

from paceline import zipline
from paceline.api import launch, simulate
from paceline.cluster import Cluster
from paceline.core.policy import Policy
from paceline.core.trace import Trace
from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.optim import Optimizer
from paceline.policies import ASP, BSP, SSP, Backup
from paceline.run import Run
from paceline.sampling import Sampler
from paceline.session import init, log

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "Backup",
    "Cluster",
    "ConfigError",
    "Optimizer",
    "PacelineError",
    "Policy",
    "Run",
    "RunFailed",
    "Sampler",
    "Trace",
    "init",
    "launch",
    "log",
    "simulate",
    "zipline",
]
