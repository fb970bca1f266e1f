"""The networks for 28 x 28 images: two convolutions, a residual network of 20 layers, and one of VGG's kind.

None has batch norm: a batch's statistics are no function of one sample, which `torch.func.vmap` cannot batch over
workers, and asynchronous workers have no joined batch to take them from.
"""

from __future__ import annotations

from torch import Tensor, nn

CLASSES = 10
GROUPS = 8
STAGES = 3
BLOCKS = 3
"""Blocks of each stage: with two convolutions each, the first one and the last layer, 20 layers."""


def fashion_cnn() -> nn.Module:
    """Makes a network of two convolutions with strides."""
    features = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
    return nn.Sequential(*features, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, CLASSES))


def convolution(inward: int, outward: int, stride: int = 1) -> nn.Conv2d:
    """Makes a 3 x 3 convolution without a bias, as a norm follows it."""
    return nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False)


class ResidualBlock(nn.Module):
    """Two convolutions with norms beside a way around, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.convolved = nn.Sequential(
            convolution(inward, outward, stride), nn.GroupNorm(GROUPS, outward), nn.ReLU(),
            convolution(outward, outward), nn.GroupNorm(GROUPS, outward),
        )  # fmt: skip
        changes = inward != outward or stride != 1
        self.around = nn.Conv2d(inward, outward, 1, stride=stride, bias=False) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = self.convolved(images) + self.around(images)
        return added.relu()


def resnet20(width: int) -> nn.Module:
    """Makes the residual network of He et al. 2016, section 4.2, with n = 3 and group norm, for images of one
    channel."""
    layers: list[nn.Module] = [convolution(1, width), nn.GroupNorm(GROUPS, width), nn.ReLU()]
    inward = width
    for stage in range(STAGES):
        for block in range(BLOCKS):
            outward = width << stage
            layers.append(ResidualBlock(inward, outward, 2 if stage and not block else 1))
            inward = outward
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inward, CLASSES))


def vgg(connected: int) -> nn.Module:
    """Makes three pairs of 3 x 3 convolutions, each before a pooling, and two wide connected layers."""
    layers: list[nn.Module] = []
    inward = 1
    for outward in (32, 64, 128):
        for channels in (inward, outward):
            layers += [nn.Conv2d(channels, outward, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        inward = outward
    layers += [nn.Flatten(), nn.Linear(128 * 3 * 3, connected), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(connected, connected), nn.ReLU(), nn.Linear(connected, CLASSES))
