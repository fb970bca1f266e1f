"""Giving up a forward or backward pass in the middle, and doing it again on fresh parameters (SpecSync, live).

`step(closure)` is where this is possible: the runtime decides when the closure runs, and how often. Before each
module's forward, and after each tensor's gradient is there, a hook looks at a word of memory (`storage/abort_flag.py`).
If the scheduler has written there that this iteration is to be begun again, the hook raises `Aborted`, which goes up
through the closure. Then gradients, buffers and generators are put back to where they were
(`worker/computation_state.py`), the worker pulls again, and the closure runs once more, on the same samples. So after
the word was written at most one more layer is computed.

    forward      module pre-hooks, so only with `model=` given to paceline.Optimizer; and then buffers are restored too
    backward     hooks after a tensor's gradient was accumulated. (Not register_full_backward_hook: it wraps what goes
                 into a module and what comes out, and then in-place ReLU fails.)
    sleeping     where a scenario slows a worker down, the sleep stands for computing and is cut short

`Aborted` is no Exception, so a script that catches those does not see it. One that catches everything, and goes on,
will be told so by the next hook; and whatever becomes of the exception, a pass in which it was raised does not count.

What cannot be given up. A second attempt: an iteration is aborted once at most. A gradient that is complete: `step`
has left the closure by then. A pass outside of `step`, as in evaluation. One that has drawn the last samples of an
epoch itself (`trainer/sample_leases.py`). With `step()` without a closure nothing can,
nor with `overlap=True`, which has handed out parts of the gradient already: that is said once, and the re-syncs are
ignored. On a GPU the host is made not to run far ahead of the device (`cuda_copies.RunAheadLimit`), or it would be in
the next iteration when the scheduler's word comes.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.core.actions import Compute
from paceline.runtime.live.storage import abort_flag
from paceline.runtime.live.storage.abort_flag import AbortFlag
from paceline.runtime.live.trainer.sample_leases import SampleLeases
from paceline.runtime.live.worker import cuda_copies
from paceline.runtime.live.worker.computation_state import ComputationState

logger = logging.getLogger(__name__)

NEVER = -1
"""What the word never is."""


class Aborted(BaseException):
    """Raised in the middle of a closure whose computation is given up. It ends in `step`."""


class Hook:
    """What modules and tensors call; on a GPU, in backward, in a thread of autograd's.

    A module's hooks are copied and pickled with it. The run is not, nor should a copy (an average, the best model so
    far) end its computations: so this holds the run weakly, and its copies do nothing.
    """

    def __init__(self, called: Callable[[], None] | None = None) -> None:
        """`called` is a method of the run."""
        self.called = weakref.WeakMethod(called) if called is not None else None

    def __call__(self, *passed: Any) -> None:
        called = self.called() if self.called is not None else None
        if called is not None:
            called()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Computation(Protocol):
    """What the script computes, as the worker's machine has ordered it."""

    @property
    def ordered(self) -> Compute | None: ...

    def stretch(self, started: float, look: Callable[[], None] | None = None) -> None:
        """Makes the computation as long as the scenario says; calls `look` now and then meanwhile."""

    def begin_again(self) -> None:
        """Returns when fresh parameters for the same iteration are in the model."""


class AbortableStep:
    """Runs closures for one worker, so that they can be interrupted."""

    def __init__(
        self,
        computation: Computation,
        leases: SampleLeases,
        flag: AbortFlag,
        rank: int,
        tensors: Sequence[Tensor],
        module: nn.Module | None,
    ) -> None:
        self.computation = computation
        self.leases = leases
        self.flag = flag
        self.word = flag.word
        self.rank = rank
        self.awaited = NEVER
        """The word that ends what is being computed."""
        self.given_up = False
        self.warned = False
        others = [] if module is None else [tensor for tensor in module.parameters() if tensor.requires_grad]
        every = list({id(tensor): tensor for tensor in [*tensors, *others]}.values())
        self.rewind = ComputationState(every, module)
        self.pace = cuda_copies.RunAheadLimit(every) if any(tensor.device.type == "cuda" for tensor in every) else None
        hook = Hook(self.pass_hook)
        for tensor in every:
            tensor.register_post_accumulate_grad_hook(hook)
        for part in module.modules() if module is not None else ():
            part.register_forward_pre_hook(hook, prepend=True)

    def run(self, closure: Callable[[], Any], started: float) -> Any:
        """The closure's result, of its first run or, if that is given up, of its second."""
        ordered = self.computation.ordered
        assert ordered is not None
        if ordered.attempt:  # the second run has raised an error, and the script has called `step` once more
            return self.run_to_the_end(closure, started)
        self.rewind.mark()
        self.leases.begin_pass()
        self.given_up = False
        self.awaited = ordered.iteration + 1
        result = None
        try:
            result = closure()
            self.computation.stretch(started, self.look)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            if not self.given_up:
                raise
        finally:
            self.awaited = NEVER
        self.leases.end_pass(self.given_up)
        if not self.given_up:
            self.rewind.forget()
            return result
        del result
        self.rewind.restore()
        self.computation.begin_again()
        return self.run_to_the_end(closure, time.monotonic())

    def run_to_the_end(self, closure: Callable[[], Any], started: float) -> Any:
        result = closure()
        self.computation.stretch(started)
        return result

    def pass_hook(self) -> None:
        """Before every module and after every gradient. On a GPU it may first wait for the device."""
        if self.awaited != NEVER:
            if self.pace is not None:
                self.pace.keep()
            self.look()

    def look(self) -> None:
        if self.word[0] == self.awaited and (self.given_up or self.leases.may_repeat()):
            self.given_up = True
            raise Aborted

    def warn(self) -> None:
        """A step without a closure: say once what that means."""
        if not self.warned:
            tell_ignored(self.rank, "step() without a closure")
        self.warned = True

    def close(self) -> None:
        self.word = memoryview(bytes(abort_flag.SIZE)).cast("q")
        self.flag.close()


def tell_ignored(rank: int, what: str) -> None:
    """One line, not one from each worker."""
    if rank == 0:
        logger.warning(f"specsync cannot interrupt {what}: its re-syncs are ignored")
