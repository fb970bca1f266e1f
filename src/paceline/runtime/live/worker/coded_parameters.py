"""Parameters that come from a server on another host in a code: the difference from what this worker has.

The first answer has them as they are, and a number for what the worker then has. With every request the worker names
that number, and the server answers with the difference from it, coded, and a new number. When an answer was lost the
numbers do not match, and the parameters come whole once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.runtime.live.protocol.coded_messages import NOTHING_HELD, CodedParameters
from paceline.tensors import wire_precision
from paceline.tensors.wire_codecs import WireCodec, WrongFrames


class KnownParameters:
    """One server's part of the parameters, as this worker has it."""

    def __init__(self, codec: WireCodec, places: Sequence[Tensor]) -> None:
        """They belong into these places, which hold other things as well."""
        self.codec = codec
        self.places = places
        self.known = [torch.zeros_like(place) for place in places]
        self.number = NOTHING_HELD
        """What `known` is."""

    def take(self, answer: CodedParameters, frames: Sequence[memoryview]) -> None:
        """Writes what came into its places; if it does not fit, the server is to send everything."""
        held, self.number = self.number, NOTHING_HELD
        if answer.base == NOTHING_HELD:
            wire_precision.fill(self.known, frames, self.known[0].dtype if self.known else torch.float32)
        elif answer.base != held:
            raise WrongFrames("it is a difference from what this worker does not have")
        else:
            wire_precision.check_lengths(frames, [self.codec.nbytes(len(each)) for each in self.known])
            for frame, known in zip(frames, self.known, strict=True):
                wire_precision.add_difference(self.codec, wire_precision.tensor_of(frame), known)
        for place, known in zip(self.places, self.known, strict=True):
            place.copy_(known)
        self.number = answer.number
