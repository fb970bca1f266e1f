"""Lightning on machines of unequal speed: `import paceline.lightning`, then `Trainer(strategy="paceline")`.

    paceline run --workers 4 --servers 2 --policy ssp:staleness=3 train.py

Each worker runs the trainer of its own. The strategy wraps the module's optimizers when training begins, so that
checkpoints are restored before, has `paceline.Sampler` deal the training data, and lets only the first worker write.
Works with `lightning` and with `pytorch_lightning`, whichever the script has imported (docs/trainers.md).
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import data

import paceline
from paceline import metric_names, session
from paceline.core.policy import Policy
from paceline.errors import ConfigError, PacelineError
from paceline.optim import Optimizer, choose, read_options
from paceline.several_optimizers import optimizers as wrap_all
from paceline.tensors.optimizers import Extras
from paceline.trainer_clipping import has_local_steps, with_clipping

logger = logging.getLogger(__name__)

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import Strategy, StrategyRegistry
    from pytorch_lightning.utilities import rank_zero_only
else:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy, StrategyRegistry
    from lightning.pytorch.utilities import rank_zero_only

NAME = "paceline"


class PacelineStrategy(Strategy):  # type: ignore[misc]  # the type checker does not read Lightning
    """Has a policy say who waits for whom: `Trainer(strategy=PacelineStrategy(policy="ssp:staleness=3"))`.

    `policy`, `overlap` and `options` are those of `paceline.Optimizer`; `paceline run --policy` beats the first.
    """

    strategy_name = NAME

    def __init__(
        self,
        policy: str | Policy | None = None,
        overlap: bool = False,
        options: str = "",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        if policy is not None:
            choose(policy, None, None, None)
        read_options(options)
        self.policy, self.overlap, self.options = policy, overlap, options
        self.world = paceline.init()
        self.global_rank = self.local_rank = self.world.rank
        self.node_rank = 0
        self.world_size = self.world.size
        self.parallel_devices: list[torch.device] | None = None
        """Those of the trainer, which sets them: this worker takes one of them, by its rank."""
        self.wrapped: tuple[Optimizer, ...] = ()
        self.dealt: list[tuple[object, paceline.Sampler]] = []
        """Data sets, and their samplers: a loader that is made anew goes on with the sampler it had."""
        self.taken: float | None = None
        """The norm that the trainer was to clip gradients to."""
        rank_zero_only.rank = self.global_rank

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__, override=True)

    # Places and processes.

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return torch.device(devices[self.global_rank % len(devices)])

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for the others before training, so that the first may prepare data; later nobody waits but as the
        policy says."""
        if name == "pre_setup" and self.world.run is not None and self.world.live is None and not session.has_begun():
            paceline.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Each worker decides for itself: workers are not at one point."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What a worker logs is its own, as workers are not at one point."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.world_size > 1:
            raise PacelineError("all_gather needs all workers at one point, and they are not: log what each has")
        return tensor

    # The beginning: optimizers are wrapped when their state has been restored, and before data is drawn.

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self.world.live is not None:
            raise PacelineError("a run trains once: Trainer.fit was called a second time in one script")
        self.wrapped = ()
        super().setup_optimizers(trainer)

    def begin(self) -> None:
        """Wraps the optimizers; from now on this worker takes part in the run."""
        inner: list[torch.optim.Optimizer] = list(super().optimizers)
        if self.wrapped or not inner:
            return
        options = self._take_clipping()
        if len(inner) == 1:
            self.wrapped = (Optimizer(inner[0], self.policy, self.lightning_module, self.overlap, options),)
        elif self.overlap:
            raise ConfigError("overlap=True is for one optimizer")
        else:
            self.wrapped = wrap_all(*inner, policy=self.policy, model=self.lightning_module, options=options)
        self.optimizers = list(self.wrapped)
        for configured in self.lr_scheduler_configs:
            try:
                self.wrapped[0].attach(configured.scheduler)
            except ConfigError as error:
                logger.warning(f"WARNING: it begins afresh when the run is resumed: {error}")

    def _take_clipping(self) -> Extras:
        """Has the servers clip the mean gradient, in place of the trainer, if it is to be clipped by its norm."""
        module = self.lightning_module
        trainer = module.trainer
        own = type(module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping
        if own or trainer.gradient_clip_algorithm == "value" or has_local_steps(self.policy):
            return with_clipping(self.options, None, self.policy)
        self.taken, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        return with_clipping(self.options, self.taken, self.policy)

    def process_dataloader(self, dataloader: object) -> object:
        """Has `paceline.Sampler` deal the training data, if the loader has a sampler of its own making."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        self.begin()
        if not isinstance(dataloader, data.DataLoader) or isinstance(dataloader.dataset, data.IterableDataset):
            return dataloader
        sampler = dataloader.batch_sampler if dataloader.batch_size is None else dataloader.sampler
        if isinstance(sampler, paceline.Sampler | paceline.BatchSampler):
            return dataloader
        if type(sampler) not in (data.RandomSampler, data.SequentialSampler) or trainer.overfit_batches:
            if self.world_size > 1:
                logger.warning(
                    f"WARNING: worker {self.global_rank}: each worker draws from its own {type(sampler).__name__}: a "
                    "paceline.Sampler would deal the data among them"
                )
            return dataloader
        return self._with_sampler(dataloader)

    def _with_sampler(self, loader: data.DataLoader[Any]) -> data.DataLoader[Any]:
        known = next((sampler for dataset, sampler in self.dealt if dataset is loader.dataset), None)
        if known is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
            known = paceline.Sampler(cast(Sized, loader.dataset), seed=seed)
            self.dealt.append((loader.dataset, known))
        dealt = copy.copy(loader)
        batches = data.BatchSampler(known, loader.batch_size or 1, loader.drop_last)
        dealt.__dict__.update(sampler=known, batch_sampler=batches if loader.batch_size is not None else None)
        return dealt

    # Steps.

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        trainer = self.lightning_module.trainer
        for each in self.wrapped:
            each.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers look whether it was stepped
        if self.wrapped and (self.wrapped[0].done or 0 < trainer.max_steps <= self.wrapped[0].global_step):
            trainer.should_stop = True
        return result

    # Results.

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state is on the servers, and only who writes a checkpoint fetches it."""
        plain = next((each for each in self.wrapped if each is getattr(optimizer, "_optimizer", optimizer)), None)
        if plain is not None and (self.world.end or not self.is_global_zero):
            state: dict[str, Any] = plain.inner.state_dict()
        else:
            state = super().optimizer_state(optimizer)
        return state

    def on_validation_end(self) -> None:
        """The run's history gets the metrics of the first worker, so that one of them can be the run's target."""
        trainer = self.lightning_module.trainer
        if not self.is_global_zero or trainer.sanity_checking or self.world.end:
            return
        metrics = {name: value for name, value in trainer.callback_metrics.items() if metric_names.is_name(name)}
        if metrics:
            paceline.log(**metrics)

    def on_train_end(self) -> None:
        """Leaves the run, so that nobody waits for this worker; the script goes on."""
        if self.taken is not None:
            self.lightning_module.trainer.gradient_clip_val = self.taken
        if self.world.live is None:
            return
        if self.is_global_zero and not self.world.end:
            for each in self.wrapped:
                each.state_dict()  # for checkpoints after the end
        session.retire()


PacelineStrategy.register_strategies(StrategyRegistry)
