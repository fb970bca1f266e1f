"""How far a live run is: it gathers workers, is configured with the model they train, and has begun; then it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.core.local_steps import LocalSteps
from paceline.core.policy import PeerPolicy, Policy
from paceline.run import FINISHED
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec


@dataclass(frozen=True)
class Model:
    """What the run trains, as worker 0 has described it, and under which policy."""

    policy: Policy
    digest: str
    """All workers must have the same."""
    layout: Layout
    optimizer: OptimizerSpec
    aliases: dict[str, str]
    """Second names of tied weights."""
    local_steps: LocalSteps | None = None
    """How workers train alone between exchanges, if they do."""


@dataclass(frozen=True)
class Gathering:
    """The run waits for its workers to describe their models."""

    policy: Policy | None
    """None if the script chooses it."""


@dataclass(frozen=True)
class Configured:
    """The model and the policy are known, and the servers get ready."""

    model: Model

    @property
    def policy(self) -> Policy:
        return self.model.policy


@dataclass(frozen=True)
class Begun(Configured):
    """Workers train."""

    epoch_s: float
    """The monotonic time of second 0."""


class RunState:
    """The stage of a run, and whether it is ending."""

    def __init__(self, policy: Policy | None) -> None:
        self.stage: Gathering | Configured | Begun = Gathering(policy)
        self.stopping = False
        """The workers are to end."""
        self.finishing = False
        """The servers are to end."""
        self.ending = FINISHED
        """How the run ends, as `Run.ended` says it."""

    def configure(self, model: Model) -> None:
        """Notes that the model is known."""
        self.stage = Configured(model)

    def begin(self) -> float:
        """Starts the run's clock; returns the monotonic time of second 0."""
        self.stage = Begun(self.model, time.monotonic())
        return self.stage.epoch_s

    @property
    def configured(self) -> bool:
        return isinstance(self.stage, Configured)

    @property
    def begun(self) -> bool:
        return isinstance(self.stage, Begun)

    @property
    def model(self) -> Model:
        """The model, which is known once the run is configured."""
        if not isinstance(self.stage, Configured):
            raise AssertionError("no worker has described its model yet")
        return self.stage.model

    @property
    def epoch_s(self) -> float:
        """The monotonic time of second 0, which is known once the run has begun."""
        if not isinstance(self.stage, Begun):
            raise AssertionError("the run has not begun")
        return self.stage.epoch_s

    @property
    def without_servers(self) -> bool:
        """Whether the workers are peers."""
        return isinstance(self.stage.policy, PeerPolicy)

    def now(self) -> float:
        """Returns the seconds since training began, the run's one clock; 0 until then."""
        return time.monotonic() - self.stage.epoch_s if isinstance(self.stage, Begun) else 0.0
