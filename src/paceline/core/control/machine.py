"""The base of the driver's machines: `handle(event) -> orders`, and nothing else changes their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

Event = TypeVar("Event")
Order = TypeVar("Order")


class ControlMachine(ABC, Generic[Event, Order]):
    """Takes an event, then checks its invariants if it is to. Equal events in equal order give equal orders."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.checks = False

    def handle(self, event: Event) -> list[Order]:
        orders: list[Order] = []
        self.orders = orders
        self.take(event)
        if self.checks:
            self.check()
        return orders

    @abstractmethod
    def take(self, event: Event) -> None:
        """Takes one event, and adds to the orders."""

    def check(self) -> None:
        """Raises `InvariantViolated` if the state is impossible."""
