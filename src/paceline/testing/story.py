"""What happened in a random run, and the error that tells it."""

from __future__ import annotations

from collections import Counter

from paceline.core.formatting import to_text
from paceline.core.trace import Header, Trace


class Story:
    """What happened in a run. `counts` has deliveries, kills, joins, and each kind of action by name ("Apply", ...)."""

    def __init__(self, header: Header) -> None:
        self.trace = Trace(header)
        self.counts: Counter[str] = Counter()

    def expect(self, condition: bool, rule: str, what: str) -> None:
        if not condition:
            raise PolicyBroken(rule, what, self)

    def lines(self, last: int) -> list[str]:
        lines = []
        for record in self.trace.records[-last:]:
            lines.append(f"{record.event.at:8.2f} {record.node}: {to_text(record.event)}")
            lines.extend(f"{'':10}-> {to_text(action)}" for action in record.actions)
        return lines


class PolicyBroken(AssertionError):
    """A policy broke a rule. `rule` is one word of the list in `paceline.testing`; the message ends with the last
    steps."""

    def __init__(self, rule: str, what: str, story: Story) -> None:
        header = story.trace.header
        title = f"{rule}: {what} ({header.policy}, {header.members}, seed {header.seed})"
        super().__init__("\n".join([title, *story.lines(last=25)]))
        self.rule = rule
        self.story = story
