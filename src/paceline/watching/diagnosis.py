"""Who slows a run down, since when and why, from what its trace has measured.

A worker slows the run down if its last iterations, without the time it waited for others, took clearly longer than
those of the others, all but one of them, and by more than a scheduler's whim; or if one iteration is under way for many
times as long as they usually take. A server does if slices take clearly longer there than at the other servers, or than
before. The cause is the part of an iteration in which the excess is. Where the trace does not tell the cause, it says
so: nothing here is guessed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import comb
from statistics import median

from paceline.core.step_times import TurnRow
from paceline.report.worker_spans import Span
from paceline.watching.computing import computing_cause, described, ms
from paceline.watching.iterations import Iteration, IterationCutter, caused
from paceline.watching.remedies import ALL_THE_SAME, Slow, remedies
from paceline.watching.snapshot import COMPUTES, PUSHES, READS, Finding, WorkerRow

LAST = 6
"""So many iterations of a worker are looked at for whether it is slow now; all but one must be long."""
SLOWER = 1.3
"""So many times as long as the others' the median of its iterations must be,"""
EACH_SLOWER = 1.2
"""so many times as long each of them,"""
WINDOWS = (6, 8, 10, 12, 16, 24)
LOOKED_BACK = 48
CHANCE = 1e-6
"""So improbable it must be that so many of its latest iterations, in one of these windows, are long by chance."""
LEAST_S = 0.003
"""and by so many seconds at least."""
STUCK_S, STUCK_TIMES = 1.0, 6.0
"""An iteration that takes so long, and so many times as long as is usual, is a finding before it has ended."""
MOST_FINDINGS = 3
SERVER_SHARE = 0.15
"""A server is a finding only if what it takes longer is this share of an iteration."""
MAIN = 0.6
"""A part with this share of the excess is the cause."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a run in the last minute, of those who take part."""

    policy: str
    peers: bool
    now: float
    servers: int
    cutters: Mapping[int, IterationCutter]
    rows: Mapping[int, WorkerRow]
    waits: list[Span]
    since_s: float
    goes_on: bool
    before: Mapping[str, Finding]
    """What was found when the run was looked at before."""
    turns: Mapping[int, Collection[TurnRow]]
    """shard -> what its server did in its last turns."""

    @property
    def noun(self) -> str:
        return "peer" if self.peers else "worker"

    def recent(self, rank: int) -> list[Iteration]:
        return [each for each in self.cutters[rank].done[-LAST:] if each.end_s >= self.since_s]


def explain(seen: Seen) -> tuple[list[Finding], str]:
    """Returns who slows the run down, most costly first, and what there is to say if nobody does."""
    if len(seen.rows) < 2:
        return [], "a worker that is alone waits for nobody" if seen.rows else ""
    known = {rank: recent for rank in seen.rows if len(recent := seen.recent(rank)) >= LAST - 1}
    typical = {rank: median(each.own_s for each in recent) for rank, recent in known.items()}
    ordered = sorted(typical.values())
    findings: list[Finding] = []
    for rank in seen.rows:
        others = list(ordered)
        if rank in typical:
            del others[bisect_left(others, typical[rank])]
        if others and (found := slow_worker(seen, rank, middle(others), typical.get(rank), known)) is not None:
            findings.append(found)
    slow = {found.rank for found in findings}
    findings += slow_servers(seen, {rank: recent for rank, recent in known.items() if rank not in slow})
    findings.sort(key=lambda found: (-found.cost_s, -found.times))
    return findings[:MOST_FINDINGS], "" if findings else nobody(seen, known)


def middle(values: list[float]) -> float:
    """Returns the median of values that are in order."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def slow_worker(
    seen: Seen, rank: int, usual: float, own: float | None, known: Mapping[int, list[Iteration]]
) -> Finding | None:
    """Says how a worker slows the run down, if it does. Its iterations take `own` seconds, the others' the `usual`."""
    if seen.goes_on and (stuck := stuck_worker(seen, rank, usual)) is not None:
        return stuck
    if own is None or own < SLOWER * usual or own - usual < LEAST_S:
        return None
    mine = known[rank]
    long = [each.own_s > EACH_SLOWER * usual for each in mine]
    if long.count(False) > 1 or not any(long[-2:]):
        return None
    others = {other: recent for other, recent in known.items() if other != rank}
    if is_chance(seen, rank, usual, others):
        return None
    parts = excess(mine, list(others.values()))
    cause, why = cause_of(seen, rank, parts, mine, others)
    done = seen.cutters[rank].done
    who = f"{seen.noun} {rank}"
    first = beginning(done, usual)
    since_s, from_start = done[first].start_s, first == 0
    longer = from_start and seen.cutters[rank].has_dropped
    if longer and who in seen.before:
        since_s, from_start, longer = seen.before[who].since_s, seen.before[who].from_start, False
    cost_s = cost(seen, rank, since_s)
    since = "from the start" if from_start else f"since {since_s:.1f} s"
    if longer:
        since = f"since {since_s:.1f} s or before"
    saying = (
        f"{who} slows the run down {since}: its iterations take {own / usual:.1f} times as long as the others' "
        f"({ms(own)}, theirs {ms(usual)}, waiting left out)"
    )
    evidence = (
        f"in the last {len(mine)} iterations, more than the others': {described(parts)}",
        f"others waited {ms(cost_s)} for it in each of their iterations" if cost_s > 0 else
        f"nobody has waited for it: {seen.policy or 'the policy'} lets the others go on",
    )  # fmt: skip
    times = {each: median(i.own_s for i in recent) for each, recent in others.items()}
    slow = Slow(cause, seen.policy, seen.servers, rank, own, times, cost_s, from_start, parts.get("computing", 0.0))
    return Finding(
        who, rank, cause, since_s, from_start and not longer, own / usual, cost_s, saying, why, evidence, remedies(slow)
    )


def is_chance(seen: Seen, rank: int, usual: float, others: Collection[int]) -> bool:
    """Whether its latest iterations might be long by chance, as some of the others' are."""

    def long(rank: int, last: int) -> int:
        return sum(each.own_s > EACH_SLOWER * usual for each in seen.cutters[rank].done[-last:])

    # Half a long one more than were seen: of few iterations it is not known that none is ever long.
    share = median(
        (long(other, LOOKED_BACK) + 0.5) / (len(seen.cutters[other].done[-LOOKED_BACK:]) + 1) for other in others
    )
    windows = (last for last in WINDOWS if last <= max(LAST, len(seen.cutters[rank].done)))
    return all(chance(last, long(rank, last), share) > CHANCE for last in windows)


def chance(drawn: int, least: int, share: float) -> float:
    """Returns how probable it is that so many or more of those drawn are of a kind that has this share of all."""
    return sum(comb(drawn, k) * share**k * (1 - share) ** (drawn - k) for k in range(least, drawn + 1))


def stuck_worker(seen: Seen, rank: int, usual: float) -> Finding | None:
    """Says for how long a worker has been at one thing, if that is much longer than usual."""
    row = seen.rows[rank]
    typical = max(usual, seen.cutters[rank].typical_s() or 0.0)
    lasted = seen.now - row.since_s
    if row.state not in (COMPUTES, PUSHES, READS) or lasted < max(STUCK_S, STUCK_TIMES * typical):
        return None
    doing = {COMPUTES: "computes", PUSHES: "has its gradient on the way", READS: "waits for parameters on the way"}
    who = f"{seen.noun} {rank}"
    waiting = sum(rank in other.waits_for for other in seen.rows.values())
    cause = "computing" if row.state == COMPUTES else "link or server"
    why = (
        "the iteration has not ended, so that the trace does not say more; its stack would (py-spy dump --pid PID)"
        if row.state == COMPUTES
        else "a message or an answer has not arrived: the way between it and the servers, or a server that stands still"
    )
    saying = f"{who} {doing[row.state]} since {row.since_s:.1f} s, for {lasted:.1f} s: usual is {ms(typical)}"
    evidence = (f"{waiting} of {len(seen.rows) - 1} others wait for it now",)
    helps = ("--hang-timeout-s ends a worker that is stuck, --restarts starts it again",)
    return Finding(
        who, rank, cause, row.since_s, False, lasted / max(typical, 1e-6), cost(seen, rank), saying, why, evidence,
        helps,
    )  # fmt: skip


def excess(mine: list[Iteration], others: list[list[Iteration]]) -> dict[str, float]:
    """Returns how many seconds more than in the others' each part of its iterations takes, in the median."""

    def more(value: Callable[[Iteration], float]) -> float:
        return median(map(value, mine)) - median(median(map(value, recent)) for recent in others)

    return {
        "computing": more(lambda each: each.compute_s),
        "its gradient on the way": more(lambda each: each.push_s),
        "parameters on the way": more(lambda each: each.answer_s),
    }


def cause_of(
    seen: Seen, rank: int, parts: dict[str, float], mine: list[Iteration], others: Mapping[int, list[Iteration]]
) -> tuple[str, str]:
    """Returns the cause in a few words, and what is known of it in a sentence."""
    total = sum(each for each in parts.values() if each > 0)
    if parts["computing"] >= MAIN * total:
        return computing_cause(seen.cutters[rank].done[-len(mine) :], others)
    travel = total - max(0.0, parts["computing"])
    if travel >= MAIN * total:
        shards = {shard: shard_excess(shard, mine, others) for shard in range(seen.servers)}
        worst = max(shards, key=lambda shard: shards[shard], default=None)
        if (
            worst is not None
            and len(shards) > 1
            and shards[worst] >= MAIN * sum(filter(lambda e: e > 0, shards.values()))
        ):
            return "link", f"gradients and parameters take longer on their way between it and server {worst}"
        ways = "all servers alike" if len(shards) > 1 else "its server" if shards else "its neighbours"
        return "link", f"gradients and parameters take longer on their way between it and {ways}"
    return "several", "the time is in more than one part of the iteration: a host that is busy would look like that"


def shard_excess(shard: int, mine: list[Iteration], others: Mapping[int, list[Iteration]]) -> float:
    def travel(recent: list[Iteration]) -> float:
        return median(each.shards.get(shard, 0.0) for each in recent)

    return travel(mine) - median(map(travel, others.values()))


def slow_servers(seen: Seen, known: Mapping[int, list[Iteration]]) -> list[Finding]:
    """Finds servers at which slices take longer than at others, or than before, for most workers."""
    if len(known) < 2 or not seen.servers:
        return []
    whole = median(median(each.end_s - each.start_s for each in recent) for recent in known.values())
    now = {
        shard: median(median(each.shards.get(shard, 0.0) for each in recent) for recent in known.values())
        for shard in range(seen.servers)
    }
    found = []
    for shard, takes in now.items():
        elsewhere = [other for each, other in now.items() if each != shard]
        before, since_s = travel_before(seen, shard, known)
        compared = [each for each in (median(elsewhere) if elsewhere else None, before) if each is not None]
        if not compared:
            continue
        usual = min(compared)
        if takes < 2 * usual or takes - usual < max(LEAST_S, SERVER_SHARE * whole):
            continue
        than = "than before" if before is not None and usual == before else "than at the other servers"
        at_all = "" if len(now) > 1 else ", which is the only one: its host's load would look the same"
        found.append(
            Finding(
                f"server {shard}", ALL_THE_SAME, "server", since_s if since_s is not None else seen.since_s,
                since_s is None, takes / max(usual, 1e-6), takes - usual,
                f"server {shard} slows all workers down{f' since {since_s:.1f} s' if since_s is not None else ''}: "
                f"an exchange with it takes {ms(takes)}, {takes / max(usual, 1e-6):.1f} times as long {than}",
                f"it is so for most workers, so it is not the way of one of them{at_all}",
                (f"exchanges by server: {', '.join(f'{each}: {ms(now[each])}' for each in now)}",),
                remedies(Slow("server", seen.policy, seen.servers, shard, takes, {}, takes - usual, since_s is None)),
            )
        )  # fmt: skip
    return found


def travel_before(seen: Seen, shard: int, known: Mapping[int, list[Iteration]]) -> tuple[float | None, float | None]:
    """Returns how long exchanges with a server took before the last ones, in the median of the workers, and when the
    workers' last ones began to be longer; None where not enough was seen."""
    earlier, since = [], []
    for rank in known:
        done = seen.cutters[rank].done
        older = [each.shards.get(shard, 0.0) for each in done[: -2 * LAST]]
        if len(older) < LAST:
            return None, None
        usual = median(older)
        earlier.append(usual)
        first = len(done)
        while first and done[first - 1].shards.get(shard, 0.0) > 1.5 * usual:
            first -= 1
        since.append(done[min(first, len(done) - 1)].start_s)
    return median(earlier), median(since)


def beginning(done: list[Iteration], usual: float) -> int:
    """Returns the place of the first of the latest iterations that were all long, but for single ones."""
    first = len(done) - 1
    for place in range(len(done) - 1, -1, -1):
        if done[place].own_s > EACH_SLOWER * usual:
            first = place
        elif first - place > 1:
            break
    return 0 if first <= 2 else first  # the first iterations of a process are like no others


def cost(seen: Seen, rank: int, since_s: float = 0.0) -> float:
    """Returns how long others waited for this worker in each of their iterations, in the mean since then."""
    since_s = max(since_s, seen.since_s)
    waited = caused([wait for wait in seen.waits if wait.end_s > since_s]).get(rank, 0.0)
    others = [cutter.done for other, cutter in seen.cutters.items() if other != rank]
    iterations = sum(each.end_s > since_s for done in others for each in done)
    return waited / iterations if iterations else 0.0


def nobody(seen: Seen, known: Mapping[int, list[Iteration]]) -> str:
    """Says what an iteration is made of where nobody is to blame."""
    if len(known) < 2:
        return "too few iterations have been seen to say who slows the run down"
    iterations = [each for recent in known.values() for each in recent]
    parts = {
        "computing": median(each.compute_s for each in iterations),
        "gradients on the way": median(each.push_s for each in iterations),
        "waiting": median(each.wait_s for each in iterations),
        "parameters on the way": median(each.answer_s for each in iterations),
    }
    blame = caused(seen.waits)
    total = sum(blame.values())
    in_turn = ""
    if total and parts["waiting"] > LEAST_S:
        rank, most = max(blame.items(), key=lambda item: item[1])
        in_turn = f"; of the waiting {most / total:.0%} was for {seen.noun} {rank}, the rest for others in turn"
    return f"nobody slows the run down for good: an iteration is {described(parts)}{in_turn}"
