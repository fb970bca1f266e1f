"""How far everybody is, on one shard.

`next[w]` is the first iteration worker w has not pushed here; `V` is the first iteration that is not
finished (FluentPS calls it V_train). `passed[i]` counts the live members with next > i, for i >= V, and
`skipped[i]` holds those of them that will never push i. The push condition of a policy looks at how many
gradients of V are there, and how many are expected: the live members less those who skip it.

Counting pushes instead (FluentPS, Algorithm 1, `Count[progress]`) is wrong once workers die: with 4 workers,
three pushes and one of those three dead, the count equals the members although a live one has not pushed.
So a worker that leaves takes its contributions to `passed` along; the gradients it delivered in full stay.

Shards disagree for a moment, after a join or a drop. What keeps that harmless is the *promise*: a push or a
pull of iteration i says that the worker will push nothing older here, so next[w] = max(next[w], i), and nobody
expects the iterations it skipped. Without it a shard may wait for ever for a push that never comes.
"""

from __future__ import annotations

NAMED = 4
"""A reason names at most so many workers, and counts the others."""


class Progress:
    def __init__(self) -> None:
        self.V = 0
        self.next: dict[int, int] = {}
        self.passed: dict[int, int] = {}
        self.skipped: dict[int, set[int]] = {}
        self.standing: dict[int, dict[int, None]] = {}
        """next -> the workers whose `next` it is, in the order they got there."""
        self.moved = True
        """Whether anything that iteration V waits for has changed since it was last set to False."""
        self._missing: tuple[tuple[int, ...], int] | None = None

    def _move(self) -> None:
        self.moved = True
        self._missing = None

    def join(self, worker: int) -> None:
        self._move()
        self.next[worker] = self.V
        self.standing.setdefault(self.V, {})[worker] = None

    def leave(self, worker: int) -> None:
        at = self.next.pop(worker)
        self._move()
        self._lift(worker, at)
        for iteration in range(self.V, at):
            self.passed[iteration] -= 1
        for skipping in self.skipped.values():
            skipping.discard(worker)

    def push(self, worker: int, iteration: int) -> None:
        """Notes that the worker has pushed this iteration, and skips what it has not pushed before it."""
        if self.next[worker] < iteration:
            self.promise(worker, iteration)
        self._advance(worker, iteration + 1)

    def stand_at(self, worker: int, at: int) -> None:
        """Places a worker that has just joined, and has pushed everything before `at` to other shards."""
        if worker not in self.next:
            return
        if at < self.V:
            self._move()
            self._lift(worker, self.next[worker])
            self.next[worker] = at
            self.standing.setdefault(at, {})[worker] = None
        else:
            self._advance(worker, at)

    def promise(self, worker: int, to: int) -> None:
        """Notes that the worker will push nothing below `to` any more: next = max(next, to)."""
        if to <= self.next[worker]:
            return
        for iteration in range(max(self.next[worker], self.V), to):
            self.skipped.setdefault(iteration, set()).add(worker)
        self._advance(worker, to)

    def _advance(self, worker: int, to: int) -> None:
        at = self.next[worker]
        if to <= at:
            return
        self.next[worker] = to
        if at <= self.V:
            self.moved = True
            self._missing = None
        self._lift(worker, at)
        there = self.standing.get(to)
        if there is None:
            self.standing[to] = {worker: None}
        else:
            there[worker] = None
        passed = self.passed
        for iteration in range(at if at > self.V else self.V, to):
            passed[iteration] = passed.get(iteration, 0) + 1

    def rise(self) -> None:
        """Goes on to the next iteration: V is finished."""
        self._move()
        self.passed.pop(self.V, None)
        self.skipped.pop(self.V, None)
        self.V += 1

    def jump(self, to: int) -> None:
        """Raises V to `to` at a change of policy. Nobody may be beyond it; workers that are behind adopt it."""
        self._move()
        self.passed.clear()
        self.skipped.clear()
        self.V = to

    def passed_V(self) -> int:
        return self.passed.get(self.V, 0)

    def missing(self) -> tuple[tuple[int, ...], int]:
        """Returns the workers whose push of iteration V has not come: the first few by name, and how many there are."""
        if self._missing is None:
            self._missing = self._find_missing()
        return self._missing

    def _find_missing(self) -> tuple[tuple[int, ...], int]:
        count = len(self.next) - self.passed_V()
        names: list[int] = []
        for worker in self.standing.get(self.V, ()):
            names.append(worker)
            if len(names) == NAMED:
                break
        if not names and count:
            names = sorted(worker for worker, at in self.next.items() if at <= self.V)[:NAMED]
        return tuple(sorted(names)), count

    def _lift(self, worker: int, at: int) -> None:
        there = self.standing[at]
        del there[worker]
        if not there:
            del self.standing[at]


def name_workers(names: tuple[int, ...], count: int) -> str:
    """Returns 'worker 1', 'workers 1, 2', 'workers 1, 2, 5, 6 and 3 others' or 'nobody'."""
    if not names:
        return "nobody"
    listed = ", ".join(str(name) for name in names)
    others = count - len(names)
    more = f" and {others} other{'s' * (others > 1)}" if others > 0 else ""
    return f"worker{'s' * (len(names) > 1)} {listed}{more}"
