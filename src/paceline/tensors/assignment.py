"""Which server holds which part of the flat vector, and how that changes with the least movement.

At the start each server has one slice (`Layout.slices`). When the number of servers changes, a server's part becomes
several ranges: those that stay keep what they can, a new one takes the same share from each of the others, and what
a removed one had is spread over those that stay. What moves is what has to, no element more: balance says how much
each is to have in the end, to within one cache line, and only what a server has too much of, or a removed one had,
changes hands (FluentPS's elastic parameter slicing, Yao et al. 2019, III.A).

Where slices end on tensor borders whole tensors move instead, and how equal that can be depends on their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from paceline.errors import ConfigError
from paceline.tensors.layout import CACHE_LINE_BYTES, EPS, Layout

Range = tuple[int, int]
"""A range goes from an element of the flat vector up to, not including, another."""
Ranges = tuple[Range, ...]
"""A server's part of the vector: ranges in order, none empty, no two touching."""
Assignment = tuple[Ranges, ...]
"""The part of each server, by shard."""
MOST_SERVERS = 64


def initial(layout: Layout, servers: int) -> Assignment:
    """Gives one slice to each server."""
    return tuple(tidy([(part.start, part.stop)]) for part in layout.slices(servers))


def reassign(layout: Layout, before: Assignment, servers: int) -> Assignment:
    """Assigns the same vector to another number of servers. Those with the highest ranks are removed, or added."""
    if not 1 <= servers <= MOST_SERVERS:
        raise ConfigError(f"servers={servers} is out of range: 1 to {MOST_SERVERS}")
    if layout.slicing != EPS:
        raise ConfigError(
            f"the number of servers cannot change with slicing={layout.slicing}: it gives each server the tensors "
            "next to each other that its rank says, so nearly all would move"
        )
    if layout.borders != "anywhere":
        return _reassign_whole(layout, before, servers)
    return _reassign_lines(layout, before, servers)


def _reassign_lines(layout: Layout, before: Assignment, servers: int) -> Assignment:
    line = CACHE_LINE_BYTES // layout.itemsize
    parts = [[(start // line, -(-stop // line)) for start, stop in part] for part in before]
    parts += [[] for _ in range(len(before), servers)]
    loads = [size(part) for part in parts]
    wanted = [0] * len(parts)
    low, more = divmod(sum(loads), servers)
    # One line more goes to those that have most already: they need not give it away.
    for place, shard in enumerate(sorted(range(servers), key=lambda shard: -loads[shard])):
        wanted[shard] = low + (place < more)
    pool: list[Range] = []
    for shard, want in enumerate(wanted):
        parts[shard], given = _split(parts[shard], want)
        pool += given
    pool.sort()
    for part, want in zip(parts, wanted, strict=True):
        taken, pool = _split(pool, want - size(part))
        part += taken
    return tuple(
        tidy([(start * line, min(stop * line, layout.numel)) for start, stop in part]) for part in parts[:servers]
    )


def _split(ranges: Sequence[Range], count: int) -> tuple[list[Range], list[Range]]:
    """Returns the first so many units of the ranges, and the others."""
    first: list[Range] = []
    others: list[Range] = []
    for start, stop in ranges:
        cut = min(max(start, start + count), stop)
        count -= cut - start
        first += [(start, cut)] * (start < cut)
        others += [(cut, stop)] * (cut < stop)
    return first, others


def _reassign_whole(layout: Layout, before: Assignment, servers: int) -> Assignment:
    """Moves whole tensors: from removed servers to the lightest, to new ones from the heaviest while that helps.

    Of the tensors that fit below the mean it takes the largest first: what is left on the heaviest need not move.
    """
    layout.slices(servers)  # refuses more servers than tensors
    starts = list(accumulate((numel for _, numel in layout.units()), initial=0))
    units = [(start, stop) for start, stop in pairwise(starts) if start < stop]
    parts = [[unit for unit in units if overlap((unit,), part)] for part in before]
    parts += [[] for _ in range(len(before), servers)]
    staying, new = parts[: min(servers, len(before))], parts[len(before) : servers]
    for unit in sorted(chain.from_iterable(parts[servers:]), key=_length, reverse=True):
        min(staying, key=size).append(unit)
    while new:
        heaviest, lightest = max(staying, key=size), min(new, key=size)
        helping = [unit for unit in heaviest if size(lightest) + _length(unit) < size(heaviest)]
        fitting = [unit for unit in helping if (size(lightest) + _length(unit)) * servers <= layout.numel]
        if not helping and not lightest:  # nobody is left without any
            heaviest = max(staying, key=len)
            helping = heaviest
        if not helping:
            break
        unit = max(fitting, key=_length) if fitting else min(helping, key=_length)
        heaviest.remove(unit)
        lightest.append(unit)
    return tuple(tidy(part) for part in parts[:servers])


def moved(before: Assignment, after: Assignment) -> int:
    """Returns how many elements change hands."""
    kept = sum(size(overlap(old, new)) for old, new in zip(before, after, strict=False))
    return sum(size(part) for part in after) - kept


def size(part: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in part)


def _length(unit: Range) -> int:
    return unit[1] - unit[0]


def tidy(part: Sequence[Range]) -> Ranges:
    """Sorts ranges, joins those that touch, and leaves out empty ones."""
    joined: list[Range] = []
    for start, stop in sorted(part):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def overlap(first: Sequence[Range], second: Sequence[Range]) -> Ranges:
    """Returns the ranges that are in both."""
    both = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return tidy([(start, stop) for start, stop in both if start < stop])


def locate(part: Ranges, within: Ranges) -> list[slice]:
    """Returns where the ranges of `part`, all of which are in `within`, lie when those of `within` are joined end to
    end."""
    offsets = list(accumulate((_length(each) for each in within), initial=0))
    places = []
    for start, stop in part:
        index = next(index for index, (first, last) in enumerate(within) if first <= start and stop <= last)
        at = offsets[index] + start - within[index][0]
        places.append(slice(at, at + stop - start))
    return places
