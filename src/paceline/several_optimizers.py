"""`paceline.optimizers`: several optimizers in one worker, as of a GAN or of an actor and a critic.

    opt_d, opt_g = paceline.optimizers(torch.optim.Adam(net_d.parameters()), torch.optim.Adam(net_g.parameters()))

All their parameters are one vector, in the groups of all of them, and each step of any of them is an iteration of the
run. In it the parameters of the others have no gradient, so they are left alone, momentum and weight decay included;
but whoever has stepped them meanwhile, this worker reads what came out. So policies, faults, samples and peers are what
they are with one optimizer (`docs/decisions/0064-trainers.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline import session
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.optim import Optimizer, choose, read_options
from paceline.optimizer_steps import LiveSteps, StepsHere, clip, tensors_of
from paceline.tensors.optimizers import Extras

if TYPE_CHECKING:
    from paceline.lr_schedulers import LRSchedulers


def optimizers(
    *inner: torch.optim.Optimizer,
    policy: str | Policy | None = None,
    model: nn.Module | None = None,
    options: str | Extras = "",
) -> tuple[Optimizer, ...]:
    """Wraps several torch optimizers of one kind, whose steps are taken as those of one `paceline.Optimizer`.

    They come back in the same order, each with its own `step`, `zero_grad` and `state_dict`. `policy`, `model` and
    `options` are those of the run, as for `paceline.Optimizer`; `model` is an `nn.ModuleDict` or `nn.ModuleList` if
    there are several. Each step of any of them is one iteration: all workers should step them in the same order, which
    under bsp makes them equal one process on the joined batch.
    """
    extras = read_options(options) if isinstance(options, str) else options
    _check(inner, extras)
    run = session.init().run
    _, local = choose(policy, None, None, None)
    if local is not None or (run is not None and run.config.local_steps is not None):
        raise ConfigError("several optimizers exchange at every step: leave local steps out, or wrap one optimizer")
    if run is None:
        alone = tuple(OneAlone(each, options=extras) for each in inner)
        for each in alone:
            each.every = alone
        return alone
    joined = join(inner)
    whole = Optimizer(joined, policy, model, options=extras)
    return tuple(OneOfSeveral(whole, each, extras) for each in inner)


def _check(inner: Sequence[torch.optim.Optimizer], extras: Extras) -> None:
    for each in inner:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"paceline.optimizers wraps torch.optim optimizers, got {type(each).__name__}")
    kinds = dict.fromkeys(type(each).__name__ for each in inner)
    if len(kinds) != 1:
        raise ConfigError(f"paceline.optimizers takes one or more of one kind, got {', '.join(kinds) or 'none'}")
    if extras.schedule is not None:
        raise ConfigError("a schedule counts samples, which several optimizers share: use a scheduler of torch")
    seen: set[int] = set()
    for each in inner:
        mine = {id(tensor) for tensor in tensors_of(each.param_groups)}
        if mine & seen:
            raise ConfigError("a parameter is in two optimizers: each may be in one only")
        seen |= mine


class Joined:
    """The states of several optimizers, looked up by tensor."""

    def __init__(self, inner: Sequence[torch.optim.Optimizer]) -> None:
        self.owners = {tensor: each for each in inner for tensor in tensors_of(each.param_groups)}

    def get(self, tensor: Tensor, default: Any) -> Any:
        """Returns the state of a tensor."""
        return self.owners[tensor].state.get(tensor, default)

    def __setitem__(self, tensor: Tensor, state: Any) -> None:
        self.owners[tensor].state[tensor] = state


def join(inner: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns an optimizer of their kind that has their groups, the same objects, and looks up their states."""
    kind = type(inner[0])
    joined = kind.__new__(kind)
    groups = [group for each in inner for group in each.param_groups]
    torch.optim.Optimizer.__init__(joined, groups, dict(inner[0].defaults))
    joined.param_groups = groups
    joined.state = Joined(inner)  # type: ignore[assignment]
    return joined


class JoinedSteps(LiveSteps):
    """The steps of one of several optimizers: the gradients of the others' tensors are left out."""

    def __init__(self, whole: Optimizer, inner: torch.optim.Optimizer, norm: float | None, here: StepsHere) -> None:
        assert whole.live is not None
        super().__init__(whole.live.participant, inner, norm, whole.live.schedulers)
        self.whole = whole.live
        self.joined = whole.inner
        self.here = here
        own = {id(tensor) for tensor in self.trained}
        self.places = {index for index, tensor in enumerate(self.whole.trained) if id(tensor) in own}
        self.stepping = self.whole.stepping

    def compute(self, closure: Callable[[], Any] | None) -> Any:
        self.started = self.whole.started
        return super().compute(closure)

    def exchange(self, weight: float | None = None) -> None:
        self.check_frozen()
        if self.norm is not None:
            clip(self.inner.param_groups, self.norm)
        self.participant.clock.computed()
        self.schedulers.report()
        self.participant.slow_down(self.whole.started)
        self.participant.clock.injected()
        every = self.whole.gradients()
        gradients = [each if place in self.places else None for place, each in enumerate(every)]
        self.joined.__dict__["step"] = self.here.scheduled_step  # what a peer's step calls
        self.participant.exchange(gradients, self.whole.hyper.of(self.joined.param_groups), weight)
        self.participant.pass_slow_link()

    def skip(self) -> None:
        self.whole.skip()

    def begin_iteration(self) -> None:
        self.whole.begin_iteration()

    def fetch_state(self) -> Any:
        own = {id(tensor) for tensor in self.trained}
        return (each for each in self.whole.fetch_state() if id(each[0]) in own)


class OneAlone(Optimizer):
    """One of several optimizers in a world of one."""

    every: Sequence[Optimizer] = ()

    @property
    def global_step(self) -> int:
        return sum(each.here.count for each in self.every)


class OneOfSeveral(Optimizer):
    """One of several optimizers in a live run."""

    schedulers: LRSchedulers

    def __init__(self, whole: Optimizer, inner: torch.optim.Optimizer, extras: Extras) -> None:
        self.whole = whole
        self.share(inner)
        self.here = StepsHere(inner, extras)
        self.world = whole.world
        self.sends_early = False
        self.schedulers = whole.schedulers
        self.live = JoinedSteps(whole, inner, extras.clip, self.here)

    @property
    def looks_for_end(self) -> bool:
        """Whether the script has asked any of them for `done`."""
        return self.whole.looks_for_end

    @looks_for_end.setter
    def looks_for_end(self, looks: bool) -> None:
        self.whole.looks_for_end = looks
