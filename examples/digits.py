"""Handwritten digits on several workers. Alone: python examples/digits.py. Together:

    paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/digits.py

Three things make it distributed: paceline.init, paceline.Optimizer around the optimizer, paceline.Sampler.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

world = paceline.init()
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32) / 16
y = torch.tensor(labels)
train, test = TensorDataset(x[:1437], y[:1437]), (x[1437:], y[1437:])
loader = DataLoader(train, batch_size=32, sampler=paceline.Sampler(train), drop_last=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=options.lr), policy="ssp:staleness=3", model=model)

while opt.global_step < options.steps:
    for batch, target in loader:

        def closure(batch: torch.Tensor = batch, target: torch.Tensor = target) -> torch.Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            return loss

        opt.step(closure)
        if opt.global_step >= options.steps:
            break
    if world.rank == 0:
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        paceline.log(accuracy=accuracy)
        print(f"step {opt.global_step}: accuracy {accuracy:.3f}")
