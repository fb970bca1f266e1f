"""How a live run begins: when every worker that is alive has described its model and every server is configured."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from paceline import policies
from paceline.core.control.admission import (
    BeginningOrder,
    BeginRun,
    ChooseModel,
    FailToBegin,
    ModelChosen,
    ModelRefused,
    TellMissing,
    WorkersThere,
)
from paceline.core.control.worker_restarts import Outcomes
from paceline.core.policy import PeerPolicy, Policy
from paceline.errors import ConfigError, PacelineError, RunFailed
from paceline.policies.with_local_steps import check_local_steps
from paceline.runtime.clipping import check_clip_mean
from paceline.runtime.live.driver.admission import Admission
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.coordinators import Coordinators
from paceline.runtime.live.driver.durability import Durability
from paceline.runtime.live.driver.peer_setup import PeerSetup
from paceline.runtime.live.driver.run_plan import RunPlan
from paceline.runtime.live.driver.run_state import Model, RunState
from paceline.runtime.live.driver.server_placement import ServerPlacement
from paceline.runtime.live.driver.server_startup import ServerStartup
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.driver.worker_restarts import WorkerRestarts
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage import checkpoint
from paceline.runtime.live.trainer.startup import BEGUN

DEFAULT_POLICY = "bsp"
NO_OPTIMIZER = "the script ended without making a paceline.Optimizer: nothing was trained"


@dataclass(eq=False)
class ModelSetup:
    """Makes worker 0's description, and a policy that goes with it, the run's."""

    plan: RunPlan
    state: RunState
    admission: Admission
    startup: ServerStartup
    peer_setup: PeerSetup
    coordinators: Coordinators
    checkpointer: Checkpointer | None
    placement: ServerPlacement

    def configure(self, lead: wire.Describe) -> None:
        """Configures the run, unless it cannot be done with this."""
        if lead.layout is None or lead.optimizer is None:
            raise RunFailed(NO_OPTIMIZER)
        try:
            policy = self._choose_policy(lead.policy or DEFAULT_POLICY)
            check_clip_mean(policy, lead.optimizer.extras)
            if lead.local_steps is not None:
                check_local_steps(policy, lead.local_steps)
        except ConfigError as error:
            if self.plan.meeting is None or self.plan.policy is not None:
                raise
            self.admission.turn_away(lead.rank, lead.incarnation, str(error))
            self.admission.deliver(ModelRefused(lead.rank, lead.incarnation))
            return
        model = Model(policy, lead.digest, lead.layout, lead.optimizer, lead.aliases, lead.local_steps)
        self.state.configure(model)
        is_full_at = self.plan.members.workers if self.state.without_servers else None
        self.admission.deliver(ModelChosen(lead.digest, is_full_at))
        if self.checkpointer is not None:
            self.checkpointer.check_layout(lead.layout)
        self.coordinators.start_planner(model.local_steps)
        if isinstance(policy, PeerPolicy):
            self.peer_setup.prepare(policy)
            self.placement.choose_for_peers(self.admission.workers.processes(), self.peer_setup.folder)
        else:
            self.coordinators.start(model, self.plan.members)
            self.placement.choose(self.admission.workers.processes())
            self.startup.configure_all()

    def _choose_policy(self, script: str) -> Policy:
        """The run's own policy, or the script's, which comes from another host if workers run there; checked."""
        policy = self.plan.policy
        if policy is None:
            policy = policies.parse(script) if self.plan.meeting is None else policies.parse_remote(script)
        if isinstance(policy, PeerPolicy):
            policy = self.peer_setup.placed(policy)
        policy.validate(self.plan.members)
        return policy


@dataclass(eq=False)
class Beginning:
    """Tells the machine who is there, and begins the run when it says so (`core/control/admission.py`)."""

    setup: ModelSetup
    state: RunState
    admission: Admission
    servers: Servers
    restarts: WorkerRestarts
    checkpointer: Checkpointer | None
    durability: Durability
    outcomes: Outcomes
    folder: Path
    say: Callable[[str], None]
    begun: Callable[[], None]
    """Is called when training has begun."""

    def consider(self) -> None:
        """Configure or begin, if everybody is there."""
        admission, servers = self.admission, self.servers
        live, lead = admission.workers.processes(), admission.roster.incarnation(0)
        admission.deliver(
            WorkersThere(
                time.monotonic(), live, lead, bool(self.restarts.due), servers.all_there, servers.all_configured
            )
        )  # fmt: skip

    def execute(self, order: BeginningOrder) -> None:
        match order:
            case ChooseModel(rank, incarnation):
                self.setup.configure(self.admission.described[rank, incarnation])
            case FailToBegin():
                raise self.never_began()
            case BeginRun(members):
                self._begin(members)
            case TellMissing(ranks):
                missing = ", ".join(f"worker {rank}" for rank in ranks)
                self.say(f"still waiting for {missing} to make a paceline.Optimizer")
            case _:
                assert_never(order)

    def _begin(self, members: tuple[tuple[int, int], ...]) -> None:
        self.durability.begun(self.servers.count)
        # Training begins now, with servers that are ready: what they needed for that took none of its time.
        self.servers.tell_all(wire.StartClock(self.state.begin()))
        (self.folder / BEGUN).touch(0o600)
        self.begun()
        if self.checkpointer is not None:
            if self.checkpointer.checkpointing.resume and self.checkpointer.last is not None:
                shutil.copy(checkpoint.others_of(self.checkpointer.last), self.folder / "others")
            self.checkpointer.tick()  # servers are told before the first view: the checkpoint is of update 0
        self.admission.roster.admit(dict(members))
        for process in members:
            self.admission.welcome.tell(*process)

    def never_began(self) -> PacelineError:
        """Why nothing was trained."""
        outcomes = self.outcomes
        if outcomes.refused and outcomes.refused == len(outcomes.failures):
            return ConfigError(f"{outcomes.why}: see above")
        if outcomes.why:
            return RunFailed(f"{outcomes.why}, before the run began")
        return RunFailed(NO_OPTIMIZER)
