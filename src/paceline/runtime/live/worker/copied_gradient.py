"""Gradients that are copied into the worker's segment when the script steps: the usual way."""

from __future__ import annotations

from paceline.runtime.live.worker.data_path import GradientCopies


class CopiedGradient:
    """Copies each gradient as a whole."""

    def __init__(self, copies: GradientCopies) -> None:
        self.write = copies.write

    def begin(self) -> None:
        """Nothing has to be prepared."""

    def forget(self) -> None:
        """Nothing is copied before the step."""

    def release(self) -> None:
        """The segment keeps the gradient until the servers write there."""
