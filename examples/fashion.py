"""Fashion-MNIST and a learning-rate schedule on several workers. Alone: python examples/fashion.py. Together:

    paceline run --workers 3 --servers 2 --policy backup:extra=1 examples/fashion.py --steps 200

The data: apt-get install dataset-fashion-mnist, or its four idx files in a folder named by --data or PACELINE_DATA.
"""

import argparse
import gzip
import itertools
import os
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default=os.environ.get("PACELINE_DATA", "/usr/share/datasets/fashion-mnist"))
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--lr", type=float, default=0.05, help="the peak of the schedule")
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()

world = paceline.init()
torch.manual_seed(0)


def read(name: str) -> Tensor:
    """An idx file, packed or not: its fourth byte counts the dimensions, then come their sizes, then the values."""
    path = Path(options.data, name)
    raw = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    shape = struct.unpack_from(f">{raw[3]}i", raw, 4)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def load(part: str) -> tuple[Tensor, Tensor]:
    return read(f"{part}-images-idx3-ubyte").unsqueeze(1) / 255, read(f"{part}-labels-idx1-ubyte").long()


try:
    train, (test_images, test_labels) = TensorDataset(*load("train")), load("t10k")
except FileNotFoundError as error:
    advice = "apt-get install dataset-fashion-mnist, or set PACELINE_DATA to the folder of its files"
    parser.exit(2, f"fashion.py: there is no {error.filename}: {advice}\n" if world.rank == 0 else None)
loader = DataLoader(train, options.batch, sampler=paceline.Sampler(train))
batches = itertools.chain.from_iterable(itertools.repeat(loader))

features = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
model = nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
opt = paceline.Optimizer(sgd, policy="backup:extra=1", model=model)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=options.lr, total_steps=options.steps)

due = 0
while opt.global_step < options.steps:
    images, labels = next(batches)
    opt.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    opt.step()
    while schedule.last_epoch < opt.global_step:  # after a drop this worker may have jumped ahead
        schedule.step()
    if world.rank == 0 and opt.global_step >= due:
        due = min(opt.global_step + 50, options.steps)
        with torch.no_grad():
            scores = model(test_images[:2000])  # not all: the others go on meanwhile
        loss = nn.functional.cross_entropy(scores, test_labels[:2000]).item()
        accuracy = (scores.argmax(1) == test_labels[:2000]).float().mean().item()
        paceline.log(loss=loss, accuracy=accuracy)
        print(f"step {opt.global_step}: loss {loss:.3f}, accuracy {accuracy:.3f}")
