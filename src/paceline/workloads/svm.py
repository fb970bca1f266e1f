"""svm: a linear classifier of sparse texts, the classical job of parameter servers.

A sample is the set of words it has, a few of thousands, most of them common ones (Zipf's law). Some words speak for
one class, some for the other, most for none. The loss is logistic, the smooth hinge; the margin of the hinge comes
from weight decay. A gradient touches only the words of its batch, but is sent dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.workloads.base import Workload
from paceline.workloads.catalogue_entry import WorkloadSpec

WORDS, WORDS_IN_TEXT = 2000, 30
TRAIN_SAMPLES, TEST_SAMPLES = 6000, 1500
TELLING_SHARE, NOISE = 0.5, 0.1


class SparseLinear(nn.Module):
    """The sum of the weights of a text's words; the two columns are the scores of the two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 1)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.words.weight)

    def forward(self, words: Tensor) -> Tensor:
        score = self.words(words)[..., 0].sum(1) / math.sqrt(WORDS_IN_TEXT) + self.bias
        return torch.stack([-score, score], 1)


@dataclass(frozen=True)
class SVM(WorkloadSpec):
    """A linear classifier of synthetic sparse texts."""

    name: ClassVar[str] = "svm"

    def make(self) -> Workload:
        generator = torch.Generator().manual_seed(0)
        samples = TRAIN_SAMPLES + TEST_SAMPLES
        often = 1.0 / torch.arange(10.0, WORDS + 10)
        words = torch.multinomial(often.expand(samples, -1), WORDS_IN_TEXT, generator=generator)
        telling = torch.rand(WORDS, generator=generator) < TELLING_SHARE
        meaning = torch.randn(WORDS, generator=generator) * telling
        score = meaning[words].sum(1) / math.sqrt(WORDS_IN_TEXT)
        label = (score + NOISE * torch.randn(samples, generator=generator) > 0).long()
        return Workload(
            name=str(self),
            make_module=SparseLinear,
            loss=nn.functional.cross_entropy,
            train=(words[:TRAIN_SAMPLES], label[:TRAIN_SAMPLES]),
            test=(words[TRAIN_SAMPLES:], label[TRAIN_SAMPLES:]),
            batch=32,
            optimizer="adagrad:lr=0.3,weight_decay=0.00001",
        )
