"""Hugging Face's Trainer on machines of unequal speed: `from paceline.transformers import Trainer`.

    paceline run --workers 4 --servers 2 --policy ssp:staleness=3 train.py

Each worker runs the trainer of its own. The optimizer is wrapped when training begins, so that checkpoints are restored
before; `paceline.Sampler` deals the training data; the first worker evaluates, saves and says how it goes, while the
others go on as far as the policy lets them (docs/trainers.md). A trainer of one's own, or another of theirs:
`class Mine(paceline.transformers.OnWorkers, transformers.Seq2SeqTrainer)`.
"""

from __future__ import annotations

import logging
from typing import Any

import transformers
from torch.utils import data

import paceline
from paceline import metric_names, session
from paceline.core.policy import Policy
from paceline.dealt_loaders import deal
from paceline.errors import ConfigError
from paceline.optim import Optimizer
from paceline.policies.adpsgd import ADPSGD
from paceline.trainer_clipping import has_local_steps, policy_in_force, with_clipping

logger = logging.getLogger(__name__)


class OnWorkers:
    """What makes a trainer of Hugging Face's one of several workers; it stands before the trainer among the bases."""

    policy: str | Policy | None = None
    """Who waits for whom, as in `paceline.Optimizer`; `paceline run --policy` beats it."""
    options: str = ""
    """What happens around the optimizer, as in `paceline.Optimizer`."""

    args: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.world = paceline.init()
        super().__init__(*args, **kwargs)
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ConfigError(
                "Hugging Face's own distribution is on: start with `paceline run`, one GPU for each worker"
            )
        self.wrapped: Optimizer | None = None
        self.add_callback(Run(self))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> data.DataLoader[Any]:
        """The training data, dealt among the workers."""
        loader: data.DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return deal(loader, seed, self.args.gradient_accumulation_steps, looks_ahead=True)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """A gradient counts as many items as its loss is the mean of: tokens, for a language model."""
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.wrapped is not None and num_items_in_batch is not None and self.weighs:
            self.wrapped.next_weight = float(num_items_in_batch) or None
        return loss

    def begin(self, prepared: Any, scheduler: Any) -> None:
        """Wraps the optimizer, which Accelerate has prepared; from now on this worker takes part in the run."""
        if self.accelerator.scaler is not None:
            raise ConfigError("fp16 with a scaler is not supported: use bf16")
        if self.world.live is not None:
            raise ConfigError("a run trains once: Trainer.train was called a second time in one script")
        self.taken = self.args.max_grad_norm
        if not (local := has_local_steps(self.policy)):
            self.args.max_grad_norm = 0.0
        options = with_clipping(self.options, None if local else self.taken, self.policy)
        self.weighs = not local and not isinstance(policy_in_force(self.policy), ADPSGD)
        self.wrapped = Optimizer(prepared.optimizer, self.policy, self.model, options=options)  # type: ignore[attr-defined]
        prepared.optimizer = self.wrapped
        try:
            self.wrapped.attach(getattr(scheduler, "scheduler", scheduler))
        except ConfigError as error:
            logger.warning(f"WARNING: it begins afresh when the run is resumed: {error}")

    def end(self) -> None:
        """Leaves the run, so that nobody waits for this worker; the script goes on."""
        self.args.max_grad_norm = self.taken
        session.retire()

    # The first worker writes.

    def is_world_process_zero(self) -> bool:
        return self.world.rank == 0

    def is_local_process_zero(self) -> bool:
        return self.world.rank == 0

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.world.rank == 0:
            super().save_model(*args, **kwargs)  # type: ignore[misc]


class Trainer(OnWorkers, transformers.Trainer):  # type: ignore[misc]  # the type checker does not read transformers
    """Hugging Face's Trainer, as one of several workers."""


class Run(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells the run and the trainer of each other; it is the last callback, so that it has the last word."""

    def __init__(self, trainer: OnWorkers) -> None:
        self.trainer = trainer

    @property
    def first(self) -> bool:
        return self.trainer.world.rank == 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **there: Any) -> None:
        self.trainer.begin(there["optimizer"], there["lr_scheduler"])

    def on_step_end(self, args: Any, state: Any, control: Any, **there: Any) -> None:
        optimizer = self.trainer.wrapped
        assert optimizer is not None
        if optimizer.done or 0 < state.max_steps <= optimizer.global_step:
            control.should_training_stop = True
        self.leave_to_the_first(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **there: Any) -> None:
        self.leave_to_the_first(control)

    def leave_to_the_first(self, control: Any) -> None:
        """Evaluation and checkpoints are the first worker's."""
        if not self.first:
            control.should_evaluate = control.should_save = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **there: Any) -> None:
        if self.first and control.should_training_stop and state.global_step < state.max_steps:
            paceline.stop()  # as early stopping wants it, for all

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **there: Any) -> None:
        values = {name: each for name, each in (logs or {}).items() if isinstance(each, int | float)}
        named = {name: each for name, each in values.items() if metric_names.is_name(name)}
        if self.first and self.trainer.wrapped is not None and not self.trainer.world.end and named:
            paceline.log(**named)

    def on_train_end(self, args: Any, state: Any, control: Any, **there: Any) -> None:
        self.trainer.end()
