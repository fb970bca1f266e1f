"""Hugging Face's Accelerate on machines of unequal speed: `from paceline.accelerate import Accelerator`.

    paceline run --workers 4 --servers 2 --policy ssp:staleness=3 train.py

`prepare` wraps the optimizers and has `paceline.Sampler` deal the data of loaders that shuffle; loaders that do not are
taken to be for evaluation and stay as they are. The main process is the first worker (docs/trainers.md).
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from torch import nn
from torch.utils import data

import paceline
from paceline.core.policy import Policy
from paceline.dealt_loaders import deal
from paceline.errors import ConfigError
from paceline.optim import Optimizer
from paceline.several_optimizers import optimizers as wrap_all


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # the type checker does not read accelerate
    """Accelerate's own, as one of several workers.

    `policy`, `options` and `seed` are for paceline: who waits for whom, what happens around the optimizer, as
    "clip_mean=1" in place of `clip_grad_norm_`, and the order of the data. Load a state into model and optimizer before
    `prepare`.
    """

    def __init__(
        self, *args: Any, policy: str | Policy | None = None, options: str = "", seed: int = 0, **kwargs: Any
    ) -> None:
        self.world = paceline.init()
        super().__init__(*args, **kwargs)
        if self.num_processes > 1:
            raise ConfigError("Accelerate's own distribution is on: start with `paceline run`, one GPU for each worker")
        self.policy, self.options, self.seed = policy, options, seed

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Prepares as Accelerate does; the optimizers of one call are those of the run."""
        shuffled = [isinstance(getattr(each, "sampler", None), data.RandomSampler) for each in objects]
        prepared = super().prepare(*objects, **kwargs)
        every = prepared if isinstance(prepared, tuple) else (prepared,)
        for loader, shuffles in zip(every, shuffled, strict=True):
            if isinstance(loader, data.DataLoader) and shuffles:
                deal(loader, self.seed, self.gradient_accumulation_steps, looks_ahead=True)
        optimizers = [each for each in every if isinstance(each, torch.optim.Optimizer)]
        if optimizers:
            self._wrap(optimizers, [each for each in every if isinstance(each, nn.Module)])
        return prepared

    def _wrap(self, prepared: list[Any], models: list[nn.Module]) -> None:
        if self.scaler is not None:
            raise ConfigError("fp16 with a scaler is not supported: use bf16")
        own = [self.unwrap_model(each) for each in models]
        model = (own[0] if len(own) == 1 else nn.ModuleList(own)) if own else None
        inner = [each.optimizer for each in prepared]
        wrapped: tuple[Optimizer, ...]
        if len(inner) == 1:
            wrapped = (Optimizer(inner[0], self.policy, model, options=self.options),)
        else:
            wrapped = wrap_all(*inner, policy=self.policy, model=model, options=self.options)
        for there, mine in zip(prepared, wrapped, strict=True):
            there.optimizer = mine

    @property
    def is_main_process(self) -> bool:
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.world.rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.world.rank == self.world.size - 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first worker only."""
        if self.is_main_process:
            super().print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Waits until all live workers wait here."""
        paceline.barrier()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The model's parameters lie in one memory, which is no reason to leave any out when it is saved."""
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        for name, each in state.items():
            if isinstance(each, torch.Tensor):
                place = each.data_ptr(), each.shape
                copies.setdefault(place, each.detach().clone())
                state[name] = copies[place]
        return state
