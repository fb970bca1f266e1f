"""Who is a member of a live run, and who is told of it when that changes."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.messages import View
from paceline.runtime.execution import Membership


class Roster:
    """Numbers the views, and announces each to those who follow, in the order in which they came."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.followers: list[Callable[[View], None]] = []

    def follow(self, follower: Callable[[View], None]) -> None:
        """Has every view from now on announced to this follower."""
        self.followers.append(follower)

    @property
    def members(self) -> dict[int, int]:
        """The incarnation of each member."""
        return self.membership.members

    @property
    def number(self) -> int:
        return self.membership.number

    def view(self) -> View:
        return self.membership.view()

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether this process is a member."""
        return self.members.get(rank) == incarnation

    def next_incarnation(self, rank: int) -> int:
        return self.membership.next_incarnation(rank)

    def incarnation(self, rank: int) -> int:
        """Returns the last incarnation that this rank had."""
        return self.membership.incarnations.get(rank, 0)

    def admit(self, joining: dict[int, int]) -> None:
        """Takes in these (rank: incarnation)."""
        self.announce(self.membership.admit(joining))

    def remove(self, rank: int, incarnation: int, finished: bool = False) -> bool:
        """Takes a worker out, if it is in, as one that has finished or is lost. Returns whether it was in."""
        if not self.has(rank, incarnation):
            return False
        self.announce(self.membership.finish(rank) if finished else self.membership.remove(rank))
        return True

    def remove_all(self) -> None:
        self.announce(self.membership.remove(*list(self.members)))

    def renumber(self) -> View:
        """Returns the same members under a new number, without announcing them."""
        return self.membership.remove()

    def announce(self, view: View) -> None:
        for follower in self.followers:
            follower(view)
