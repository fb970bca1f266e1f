"""Stands in for torchvision where there is none: Fashion-MNIST for MNIST, and the two transforms it is used with.

For PyTorch's mnist example in `ports.py`. Nothing is downloaded: see paceline/workloads/fashion.py for where the files
may lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.workloads.fashion import load_fashion


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Tensor) -> Tensor:
        return image.to(torch.get_default_dtype())


class Normalize:
    def __init__(self, mean: tuple[float], std: tuple[float]) -> None:
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


class MNIST(Dataset[tuple[Tensor, int]]):
    def __init__(self, root: str, train: bool, transform: Compose, download: bool = False) -> None:
        self.images, labels = load_fashion()[0 if train else 1]
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


class datasets:
    MNIST = MNIST


class transforms:
    Compose, ToTensor, Normalize = Compose, ToTensor, Normalize
