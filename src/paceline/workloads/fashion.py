"""fashion-cnn: Fashion-MNIST (28 x 28, 60 000 images of clothes) and two convolutions.

The images are not in the package: Debian's `dataset-fashion-mnist` has them, or PACELINE_DATA names their folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.workloads.base import Data, Workload
from paceline.workloads.catalogue_entry import WorkloadSpec
from paceline.workloads.data_files import find, folders, read_idx

FOLDER = "fashion-mnist"
TEST_SAMPLES = 2000
"""Of the 10 000 test images so many are used, since evaluation happens all the time."""
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


def fashion_model() -> nn.Module:
    features = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
    return nn.Sequential(*features, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


@dataclass(frozen=True)
class FashionCNN(WorkloadSpec):
    """Fashion-MNIST and two convolutions."""

    name: ClassVar[str] = "fashion-cnn"

    def make(self) -> Workload:
        train, (images, labels) = load_fashion()
        return Workload(
            name=str(self),
            make_module=fashion_model,
            loss=nn.functional.cross_entropy,
            train=train,
            test=(images[:TEST_SAMPLES], labels[:TEST_SAMPLES]),
            batch=32,
            optimizer="sgd:lr=0.05,momentum=0.9",
        )
