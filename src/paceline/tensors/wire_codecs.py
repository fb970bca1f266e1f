"""Codes in which floats travel between hosts with fewer bits, and how they are read again.

A code turns a run of floats into bytes of a length that depends on their number alone, and back into floats near them.
What a code leaves out is the business of whoever encodes (`ErrorFeedback` in `wire_precision`). Each works on tensors
of any device.

    bfloat16, float16   rounded to a half: 2 bytes a float
    int8                the nearest of 255 even steps between plus and minus the largest of each 256: 1.016 bytes
    int4                the nearest of 15, for each 64: 0.56 bytes
    topk                of each 4096 the largest `share`, with their places: 0.04 bytes at 1 %

Steps of a block's largest value: Alistarh et al. 2017 (QSGD), Dettmers et al. 2022. The largest coordinates: Aji and
Heafield 2017; Lin et al. 2018 (Deep Gradient Compression).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.spec import Spec, parameter

LARGEST = torch.finfo(torch.float32).max * (1 - 2**-20)
"""A float32 that stays finite when it is divided, rounded and multiplied."""


class WrongFrames(ValueError):
    """Frames do not fit the part that they are said to be."""


@dataclass(frozen=True)
class WireCodec(Spec, ABC):
    """Turns floats into bytes and back."""

    kind = "wire"
    block: ClassVar[int]
    """A run of floats is cut into blocks of this length, which have nothing to do with each other."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Returns how many bytes this many floats have."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Returns the bytes of these finite floats, as a tensor of uint8."""

    @abstractmethod
    def decode(self, coded: Tensor, values: Tensor) -> None:
        """Writes the floats that these bytes stand for; raises `WrongFrames` if they stand for none."""


@dataclass(frozen=True)
class HalfCodec(WireCodec):
    """Floats as 16 bits; what is larger than the largest half becomes that."""

    block = 1
    half: ClassVar[torch.dtype]

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        return rounded(values, self.half).view(torch.uint8)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        values.copy_(coded.view(self.half))


def rounded(values: Tensor, half: torch.dtype) -> Tensor:
    largest = torch.finfo(half).max
    return values.clamp(-largest, largest).to(half)


@dataclass(frozen=True)
class BFloat16(HalfCodec):
    """Each float as a bfloat16."""

    name = "bfloat16"
    half = torch.bfloat16


@dataclass(frozen=True)
class Float16(HalfCodec):
    """Each float as a float16."""

    name = "float16"
    half = torch.float16


@dataclass(frozen=True)
class StepCodec(WireCodec):
    """Whole numbers of steps; the largest of a block, in size, is `steps` of them. The size of a step is a float32."""

    steps: ClassVar[int]

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def encode(self, values: Tensor) -> Tensor:
        blocks = pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        size = (blocks.abs().amax(dim=1, keepdim=True) / self.steps).clamp_(max=LARGEST / self.steps).float()
        # Steps too small for a float32 are none at all: such values wait until they have added up.
        steps = (blocks / size.to(values.dtype)).nan_to_num_(0.0, 0.0, 0.0).round_()
        steps = steps.clamp_(-self.steps, self.steps).to(torch.int8).view(-1)[: len(values)]
        return torch.cat((size.view(-1).view(torch.uint8), self.pack(steps)))

    def decode(self, coded: Tensor, values: Tensor) -> None:
        head = 4 * self.blocks(len(values))
        size = coded[:head].clone().view(torch.float32).to(values.dtype)
        values.copy_(self.unpack(coded[head:], len(values)))
        whole = len(values) // self.block
        values[: whole * self.block].view(-1, self.block).mul_(size[:whole, None])
        values[whole * self.block :].mul_(size[whole:])

    @abstractmethod
    def pack(self, steps: Tensor) -> Tensor:
        """Returns whole numbers of steps as bytes."""

    @abstractmethod
    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """Returns the whole numbers of steps that are in these bytes."""


@dataclass(frozen=True)
class Int8(StepCodec):
    """A byte for each float."""

    name = "int8"
    block, steps = 256, 127

    def nbytes(self, numel: int) -> int:
        return 4 * self.blocks(numel) + numel

    def pack(self, steps: Tensor) -> Tensor:
        return steps.view(torch.uint8)

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        return packed.view(torch.int8)


@dataclass(frozen=True)
class Int4(StepCodec):
    """Half a byte for each float: steps from -7 to 7, plus 8; two in a byte, the first in its lower half."""

    name = "int4"
    block, steps = 64, 7

    def nbytes(self, numel: int) -> int:
        return 4 * self.blocks(numel) + -(-numel // 2)

    def pack(self, steps: Tensor) -> Tensor:
        lifted = pad(steps + 8, (0, len(steps) % 2)).view(torch.uint8).view(-1, 2)
        return lifted[:, 0] | (lifted[:, 1] << 4)

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        lifted = torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:numel]
        return lifted.view(torch.int8) - 8


@dataclass(frozen=True)
class TopK(WireCodec):
    """The largest of each block, in size, as bfloat16 with their places in the block; the others are zero."""

    name = "topk"
    block = 4096
    share: float = parameter(0.01, low=1e-4, high=1, doc="the share that is sent")

    def kept(self, numel: int) -> int:
        """Returns how many of a block of this length are sent."""
        return math.ceil(self.share * numel)

    def nbytes(self, numel: int) -> int:
        whole, rest = divmod(numel, self.block)
        return 4 * (whole * self.kept(self.block) + self.kept(rest))

    def encode(self, values: Tensor) -> Tensor:
        whole = len(values) // self.block * self.block
        parts = (values[:whole].view(-1, self.block), values[None, whole:])
        return torch.cat([each for part in parts for each in self._encode(part)])

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        places = blocks.abs().topk(self.kept(blocks.shape[1]), dim=1, sorted=False).indices
        found = rounded(blocks.gather(1, places), torch.bfloat16)
        return places.to(torch.int16).view(-1).view(torch.uint8), found.view(-1).view(torch.uint8)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        values.zero_()
        whole = len(values) // self.block * self.block
        middle = self.nbytes(whole)
        if whole:
            self._decode(coded[:middle], values[:whole].view(-1, self.block))
        if whole < len(values):
            self._decode(coded[middle:], values[None, whole:])

    def _decode(self, coded: Tensor, blocks: Tensor) -> None:
        count, length = blocks.shape
        half = len(coded) // 2
        places = coded[:half].view(torch.int16).view(count, -1).to(torch.int64)
        if places.min() < 0 or places.max() >= length:
            raise WrongFrames("it has a value at a place that is not there")
        found = coded[half:].view(torch.bfloat16).view(count, -1)
        blocks.scatter_(1, places, found.to(blocks.dtype))


CODECS: dict[str, type[WireCodec]] = {codec.name: codec for codec in (BFloat16, Float16, Int8, Int4, TopK)}
