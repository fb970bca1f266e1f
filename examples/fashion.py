"""Fashion-MNIST and a learning-rate schedule on several workers. Alone: python examples/fashion.py. Together:

    paceline run --workers 3 --servers 2 --policy backup:extra=1 examples/fashion.py --steps 200

The data: apt-get install dataset-fashion-mnist, or its four idx files in a folder named by --data or PACELINE_DATA.
"""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.workloads.fashion import load_fashion

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="the folder of the four idx files")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--lr", type=float, default=0.05, help="the peak of the schedule")
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()

world = paceline.init()
torch.manual_seed(0)

try:
    train, (test_images, test_labels) = load_fashion(options.data)
except paceline.ConfigError as error:
    parser.exit(2, f"fashion.py: {error}\n" if world.rank == 0 else None)
dataset = TensorDataset(*train)
loader = DataLoader(dataset, options.batch, sampler=paceline.Sampler(dataset))
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
