"""A server's answers to a worker on another host in a code: the difference from what the worker has.

What the worker has is kept here, too, and numbered (`worker/coded_parameters.py`). So what a code leaves out of one
answer is in the difference of the next. An answer that the worker may not have got is sent again as it was.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.messages import Parameters
from paceline.runtime.live.protocol.coded_messages import NOTHING_HELD, CodedParameters
from paceline.tensors import wire_precision
from paceline.tensors.wire_codecs import WireCodec

CodedAnswer = tuple[CodedParameters, list[memoryview]]
"""The message and the frames behind it."""


class CodedAnswers:
    """What one worker has of this server's parameters, and the last answer to it."""

    def __init__(self, codec: WireCodec, values: Sequence[Tensor]) -> None:
        """`values`: the present parameters, a tensor for each frame."""
        self.codec = codec
        self.values = values
        self.held = [torch.empty_like(each) for each in values]
        self.last: CodedAnswer | None = None

    def answer(self, parameters: Parameters, held: int) -> CodedAnswer:
        """Returns the answer to a worker that holds this number, and its frames."""
        last = None if self.last is None else self.last[0]
        if last is not None and held == last.number:
            frames = [
                wire_precision.send_difference(self.codec, values, mine)
                for values, mine in zip(self.values, self.held, strict=True)
            ]
            self.last = CodedParameters(parameters, held + 1, held), wire_precision.memory_of(frames)
        elif last is None or (held, parameters) != (last.base, last.parameters) or held == NOTHING_HELD:
            torch._foreach_copy_(self.held, list(self.values))
            # The memory that is sent changes with the next answer, when the worker has asked for that.
            whole = CodedParameters(parameters, secrets.randbits(62) + 1, NOTHING_HELD)
            self.last = whole, wire_precision.memory_of(self.held)
        assert self.last is not None
        return self.last
