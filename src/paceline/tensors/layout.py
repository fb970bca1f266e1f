"""How a model's parameters lie in one flat vector, and how that vector is cut into shards.

The cut is FluentPS's elastic parameter slicing (Yao et al. 2019, III.A): slices of equal length to within one cache
line, whatever the sizes of the layers. A slice therefore begins and ends anywhere within a tensor; a `Piece` is a part
of one tensor that lies in one slice, small enough to stay in a cache while several operations go over it.

Where an optimizer must see whole tensors, or staleness is to be known layer by layer, slices end on the borders of
tensors or layers instead, and the largest is as small as that allows.

The baseline is ps-lite's cut by *key ranges*: a tensor is a key, each server has an equal share of the keys in their
order, whatever they weigh. The server that has the largest tensors then moves and steps more than the others.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from paceline.errors import ConfigError

CACHE_LINE_BYTES = 64
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EPS, KEY_RANGE = "eps", "key-range"
SLICINGS = (EPS, KEY_RANGE)
BORDERS = ("anywhere", "tensors", "layers")
Part = slice | Sequence[tuple[int, int]]
"""The part of the vector that one server holds: a slice, or several ranges (`tensors/assignment.py`)."""


class Entry(Struct, frozen=True, array_like=True):
    """One tensor of the model: its name, its shape, and the optimizer's parameter group it belongs to."""

    name: str
    shape: tuple[int, ...]
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Piece(Struct, frozen=True, array_like=True):
    """The part of tensor `entry` that lies in a slice: `length` elements from `offset` of the slice.

    `start` is where it lies in the whole vector: a slice may consist of several ranges.
    """

    entry: int
    group: int
    offset: int
    length: int
    start: int


class Layout(Struct, frozen=True, array_like=True):
    """All tensors in order, end to end, in one dtype. `borders` says where slices may end."""

    entries: tuple[Entry, ...]
    dtype: str
    borders: str = "anywhere"
    """"anywhere", on the borders of "tensors", or of "layers": tensors whose names differ after the last dot only."""
    slicing: str = EPS
    """"eps": as equal as the borders allow; "key-range": as many tensors for each server, whatever their sizes."""

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self.entries)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def digest(self) -> str:
        """Returns a short name of this layout, the same in every process that has the same one."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Returns a vector that can hold all tensors, not filled in; on the CPU if no device is named."""
        return torch.empty(self.numel, dtype=self.torch_dtype, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the tensors of the model as views of `flat`."""
        views, start = [], 0
        for entry in self.entries:
            views.append(flat[start : start + entry.numel].view(entry.shape))
            start += entry.numel
        return views

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip((entry.name for entry in self.entries), self.views(flat), strict=True))

    def slices(self, shards: int) -> list[slice]:
        """Cuts the vector into `shards` parts: equal to within a cache line, as equal as the borders allow, or by key
        ranges."""
        if self.slicing == KEY_RANGE:
            return self._slices_by_key_range(shards)
        if self.borders != "anywhere":
            return self._slices_on_borders(shards)
        line = CACHE_LINE_BYTES // self.itemsize
        lines = math.ceil(self.numel / line)
        cuts = [min(self.numel, lines * shard // shards * line) for shard in range(shards + 1)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    def units(self) -> list[tuple[str, int]]:
        """Returns what slices must not cut through: (name, number of elements) of tensors or of layers."""
        if self.borders == "tensors":
            return [(entry.name, entry.numel) for entry in self.entries]
        layers = groupby(self.entries, key=lambda entry: entry.name.rpartition(".")[0])
        return [(name, sum(entry.numel for entry in entries)) for name, entries in layers]

    def _slices_on_borders(self, shards: int) -> list[slice]:
        sizes = [size for _, size in self.units()]
        if shards > len(sizes):
            raise ConfigError(
                f"servers={shards} is out of range: 1 to {len(sizes)}, since slices end on the borders of "
                f"{self.borders} and the model has {len(sizes)}"
            )
        starts = list(accumulate(sizes, initial=0))
        cuts = [starts[index] for index in balanced(sizes, shards)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    def _slices_by_key_range(self, shards: int) -> list[slice]:
        keys = len(self.entries)
        if shards > keys:
            raise ConfigError(
                f"servers={shards} is out of range: 1 to {keys}, since slicing={self.slicing} gives each server "
                f"whole tensors and the model has {keys}"
            )
        starts = list(accumulate((entry.numel for entry in self.entries), initial=0))
        cuts = [starts[keys * shard // shards] for shard in range(shards + 1)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    def slice_bytes(self, shards: int) -> tuple[int, ...]:
        return tuple((part.stop - part.start) * self.itemsize for part in self.slices(shards))

    def pieces(self, part: Part, longest: int) -> list[Piece]:
        """Returns the parts of tensors that lie in the slice `part`, in order, none longer than `longest`."""
        if self.borders != "anywhere":
            longest = max(1, self.numel)
        starts = list(accumulate((entry.numel for entry in self.entries), initial=0))
        pieces, offset = [], 0
        for begin, end in ranges_of(part):
            for index in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                first, last = max(starts[index], begin), min(starts[index + 1], end)
                for cut in range(first, last, longest):
                    length = min(longest, last - cut)
                    pieces.append(Piece(index, self.entries[index].group, offset, length, cut))
                    offset += length
        return pieces


def ranges_of(part: Part) -> Sequence[tuple[int, int]]:
    """Returns a part as ranges."""
    return [(part.start, part.stop)] if isinstance(part, slice) else part


def imbalance(slice_bytes: Sequence[int]) -> float:
    """Returns how many times the mean the largest slice is: 1 when all are equal. The largest sets the pace."""
    total = sum(slice_bytes)
    return max(slice_bytes) * len(slice_bytes) / total if total else 1.0


def check_slicing(slicing: str) -> str:
    if slicing not in SLICINGS:
        raise ConfigError(f"unknown slicing {slicing!r} (known: {', '.join(SLICINGS)})")
    return slicing


def layout_of(named: Iterable[tuple[str, Tensor, int]], borders: str = "anywhere", slicing: str = EPS) -> Layout:
    """Makes the layout of (name, tensor, group) triples. All tensors must have one dtype, float32 or float64."""
    triples = list(named)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for _, tensor, _ in triples}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise ConfigError(f"parameters must all be float32 or all float64, got {', '.join(sorted(dtypes)) or 'none'}")
    entries = tuple(Entry(name, tuple(tensor.shape), group) for name, tensor, group in triples)
    return Layout(entries, dtypes.pop(), borders, check_slicing(slicing))


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Cuts a row of `sizes` into so many parts, none empty, so that the largest is smallest.

    Returns parts + 1 indices, 0 and len(sizes) included.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, parts, middle)) - 1 <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, parts, low)


def _fill(sizes: Sequence[int], parts: int, most: int) -> list[int]:
    """Cuts so that each part but the last is filled up to `most`, leaving at least one element for each part."""
    cuts, total = [0], 0
    for index, size in enumerate(sizes):
        to_come = parts - len(cuts)
        if index > cuts[-1] and (total + size > most or len(sizes) - index == to_come):
            cuts.append(index)
            total = 0
        total += size
    return [*cuts, len(sizes)]


def flatten(tensors: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Copies `tensors` into the views `out` (see `Layout.views`)."""
    torch._foreach_copy_(list(out), [tensor.detach() for tensor in tensors])


@torch.no_grad()
def put(tensor: Tensor, values: Tensor) -> None:
    """Copies like `copy_`, also into a tensor whose elements share memory, as after `expand`, which torch refuses."""
    shared = tensor.layout is torch.strided and any(
        stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    )
    if not shared:
        tensor.copy_(values)
        return
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    if torch.equal(values[once].expand_as(values), values):
        tensor[once].copy_(values[once])
    else:
        tensor.data = values.to(tensor, copy=True)
