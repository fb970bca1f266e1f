"""fashion-cnn, fashion-resnet20 and fashion-vgg: Fashion-MNIST (28 x 28, 60 000 images of clothes) and three networks.

The images are not in the package: Debian's `dataset-fashion-mnist` has them, or PACELINE_DATA names their folder. With
`data=synthetic` random images of the same shape are made instead, which say nothing about clothes but need no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.core.spec import option
from paceline.errors import ConfigError
from paceline.workloads.base import Data, Workload
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.data_files import find, folders, read_idx
from paceline.workloads.networks import fashion_cnn, resnet20, vgg

FOLDER = "fashion-mnist"
SYNTHETIC = "synthetic"
TEST_SAMPLES = 2000
"""Of the 10 000 test images so many are used, since evaluation happens all the time."""
SYNTHETIC_SAMPLES = 10_000
CLASSES, SIDE, COARSE, NOISE = 10, 28, 7, 0.5
ADVICE = "apt-get install dataset-fashion-mnist, or set PACELINE_DATA to the folder of its four idx files"


def load_fashion(folder: str | Path | None = None) -> tuple[Data, Data]:
    """Returns (train, test) as (images of shape 1 x 28 x 28 in [0, 1], labels), from `folder` or the usual places."""
    places = [Path(folder)] if folder is not None else folders(FOLDER)
    return _part("train", places), _part("t10k", places)


def _part(part: str, places: list[Path]) -> Data:
    images, labels = _read(f"{part}-images-idx3-ubyte", places), _read(f"{part}-labels-idx1-ubyte", places)
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        where = " or ".join(map(str, places))
        raise ConfigError(f"the {part} files in {where} do not belong together: images and labels differ")
    return images.unsqueeze(1) / 255, labels.long()


def _read(name: str, places: list[Path]) -> Tensor:
    path = find(name, places)
    if path is None:
        raise ConfigError(f"there is no {name}.gz in {' or '.join(map(str, places))}: {ADVICE}")
    return read_idx(path)


def synthetic_fashion() -> tuple[Data, Data]:
    """Returns (train, test) of random images with the shape of Fashion-MNIST's: a coarse pattern for each class, and
    noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(CLASSES, 1, COARSE, COARSE, generator=generator)
    patterns = coarse.repeat_interleave(SIDE // COARSE, 2).repeat_interleave(SIDE // COARSE, 3)
    samples = SYNTHETIC_SAMPLES + TEST_SAMPLES
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    images = torch.rand(samples, 1, SIDE, SIDE, generator=generator).mul_(NOISE).add_(patterns[labels], alpha=1 - NOISE)
    train, test = slice(0, SYNTHETIC_SAMPLES), slice(SYNTHETIC_SAMPLES, samples)
    return (images[train], labels[train]), (images[test], labels[test])


@dataclass(frozen=True)
class FashionSpec(WorkloadSpec):
    """A network that tells the images of Fashion-MNIST apart."""

    optimizer: ClassVar[str]

    data: str = option(FOLDER, choices=(FOLDER, SYNTHETIC), doc="real images, or random ones of the same shape")

    def module(self) -> nn.Module:
        """Makes the network."""
        raise NotImplementedError

    def make(self) -> Workload:
        synthetic = self.data == SYNTHETIC
        train, (images, labels) = synthetic_fashion() if synthetic else load_fashion()
        return Workload(
            name=str(self),
            make_module=self.module,
            loss=nn.functional.cross_entropy,
            train=train,
            test=(images[:TEST_SAMPLES], labels[:TEST_SAMPLES]),
            batch=32,
            optimizer=self.optimizer,
            data=f"{len(train[0])} synthetic images" if synthetic else "",
        )


@dataclass(frozen=True)
class FashionCNN(FashionSpec):
    """Fashion-MNIST and two convolutions."""

    name: ClassVar[str] = "fashion-cnn"
    optimizer: ClassVar[str] = "sgd:lr=0.05,momentum=0.9"

    def module(self) -> nn.Module:
        return fashion_cnn()


@dataclass(frozen=True)
class FashionResNet20(FashionSpec):
    """Fashion-MNIST and a residual network of 20 layers with group norm."""

    name: ClassVar[str] = "fashion-resnet20"
    optimizer: ClassVar[str] = "sgd:lr=0.1,momentum=0.9,weight_decay=0.0001"

    width: int = option(16, low=8, high=256, doc="channels of the first stage, a multiple of 8; 16 is He et al.'s")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % 8:
            raise ConfigError(f"{self.name}:width={self.width} is not a multiple of 8, the number of groups")

    def module(self) -> nn.Module:
        return resnet20(self.width)


@dataclass(frozen=True)
class FashionVGG(FashionSpec):
    """Fashion-MNIST and six convolutions under wide connected layers."""

    name: ClassVar[str] = "fashion-vgg"
    optimizer: ClassVar[str] = "sgd:lr=0.01,momentum=0.9"

    connected: int = option(1024, low=16, high=8192, doc="units of each of the two connected layers")

    def module(self) -> nn.Module:
        return vgg(self.connected)
