"""char-transformer: a small causal transformer learns a text letter by letter.

The text is the file `input.txt` of the folder PACELINE_DATA (or of its sub-folder `char-transformer`), else the twenty
kilobytes that ship with paceline; the result says which. A sample is a window of `context` letters, the target is the
same window one letter on, so the accuracy is the share of letters guessed right. The last letters are held out.

With the default options there are about 10^5 parameters; `width=256,layers=4` has 3.2 million. Attention is written out
with matrix products, which `torch.func.vmap` batches over workers that each have parameters of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.core.spec import option
from paceline.errors import ConfigError
from paceline.workloads.base import Workload
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.data_files import find, folders, read_bytes

SHIPPED = Path(__file__).parent / "relay.txt"
HELD_OUT = 2048
"""Letters at the end of the text that are tested on."""
HEADS = 4


@dataclass(frozen=True)
class CharTransformer(WorkloadSpec):
    """A causal transformer that learns a text letter by letter."""

    name: ClassVar[str] = "char-transformer"

    width: int = option(64, low=HEADS, high=4096, doc="the size of a letter's vector, a multiple of 4")
    layers: int = option(2, low=1, high=64, doc="layers of attention and two connected ones")
    context: int = option(64, low=2, high=1024, doc="how many letters it sees")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % HEADS:
            raise ConfigError(f"{self.name}:width={self.width} is not a multiple of {HEADS}, the number of heads")

    def make(self) -> Workload:
        path = find("input.txt", folders(self.name))
        letters, tokens = read_letters(path or SHIPPED, self.context)
        train, test = tokens[:-HELD_OUT], tokens[-HELD_OUT:]
        windows, held_out = train.unfold(0, self.context + 1, 1), test.unfold(0, self.context + 1, self.context)
        return Workload(
            name=str(self),
            make_module=partial(Writer, letters, self.width, self.layers, self.context),
            loss=loss_of_letters,
            train=(windows[:, :-1], windows[:, 1:]),
            test=(held_out[:, :-1], held_out[:, 1:]),
            batch=16,
            optimizer="adamw:lr=0.003,clip=1",
            data=f"{len(tokens)} letters of {path}" if path is not None else f"{len(tokens)} letters that ship with it",
        )


def loss_of_letters(scores: Tensor, letters: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all places, each as a sample: torch's own sum over places has no fixed order
    on a GPU."""
    return nn.functional.cross_entropy(scores.transpose(1, 2).flatten(0, 1), letters.flatten())


class Block(nn.Module):
    """A layer of causal attention, then two connected ones, each after a norm and beside a way around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.connected = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, future: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.queries_keys_values(self.attention_norm(hidden))
        queries, keys, values = parts.view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(width // HEADS)
        seen = scores.masked_fill(future, -math.inf).softmax(-1) @ values
        hidden = hidden + self.mixed(seen.transpose(1, 2).reshape(samples, length, width))
        mixed: Tensor = hidden + self.connected(self.norm(hidden))
        return mixed


class Writer(nn.Module):
    """Scores of the next letter after each place, as (samples, letters, places)."""

    def __init__(self, letters: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, read: Tensor) -> Tensor:
        hidden = self.letter(read) + self.place.weight
        future = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool, device=read.device).triu(1)
        for block in self.blocks:
            hidden = block(hidden, future)
        scores: Tensor = self.head(self.norm(hidden)).transpose(1, 2)
        return scores


def read_letters(path: Path, context: int) -> tuple[int, Tensor]:
    """Returns how many different letters a text has, and the text as their numbers, in the order of the alphabet."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    least = HELD_OUT + context + 1
    if len(text) <= least:
        raise ConfigError(f"{str(path)!r} has {len(text)} letters: with context={context} more than {least} are needed")
    number = {letter: index for index, letter in enumerate(sorted(set(text)))}
    return len(number), torch.tensor([number[letter] for letter in text])
