"""What peers leave: each that ends well its parameters, in the run's folder; the model of the run is their average.

A checkpoint is that average too, and what the optimizers had learned, in the mean: a run that goes on from one starts
all peers with it.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import RunFailed
from paceline.runtime.live.driver.checkpointing import Checkpointer
from paceline.runtime.live.driver.results import readable
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage import checkpoint
from paceline.runtime.live.storage.final_parameters import Final, average, final_name
from paceline.tensors import state
from paceline.tensors.layout import Layout

ONLY_SHARD = 0


def final_of_peers(folder: Path, layout: Layout) -> Final:
    """Returns the average of what the peers that ended well have left."""
    left = readable(sorted(folder.glob(final_name("*"))))
    if not left:
        raise RunFailed("no peer came to its end: nothing is left of the model")
    return average(left, layout)


def keep_peers(checkpointer: Checkpointer, layout: Layout, folder: Path) -> None:
    """Write the checkpoint that is under way, at the end."""
    part = checkpointer.under_way
    if part is None:
        return
    final = final_of_peers(folder, layout)
    entry, error = None, ""
    try:
        learned = state.cut(final.learned, layout, slice(0, layout.numel)) if final.learned else {}
        entry = checkpoint.write_shard(part, ONLY_SHARD, final.values, learned, final.iteration, final.iteration)
    except (OSError, SafetensorError) as problem:
        error = str(problem)
    everything = (((0, layout.numel),),)  # is in one file: the driver writes it
    checkpointer.saved(wire.Saved(str(part), ONLY_SHARD, entry, error), everything)
