"""Two networks with an optimizer each, on several workers: a GAN that learns a ring. Alone: python examples/gan.py.

    paceline run --workers 3 --servers 2 --policy ssp:staleness=3 examples/gan.py

paceline.optimizers takes both optimizers at once; the rest of the loop is as it was.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1500, help="of each network")
options = parser.parse_args()

world = paceline.init()
torch.manual_seed(0)
angles = torch.rand(4096) * 2 * math.pi
data = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(4096, 2))
loader = DataLoader(data, batch_size=64, sampler=paceline.Sampler(data), drop_last=True)


def network(inputs: int, outputs: int) -> nn.Module:
    """Returns a small network."""
    hidden = (nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    return nn.Sequential(*hidden)


critic, maker = network(2, 1), network(8, 2)
opt_critic, opt_maker = paceline.optimizers(
    torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    policy="ssp:staleness=3",
    model=nn.ModuleDict({"critic": critic, "maker": maker}),
)
torch.manual_seed(1 + world.rank)  # noise of its own for each worker
softplus = nn.functional.softplus

while opt_maker.global_step < 2 * options.steps:
    for (real,) in loader:
        made = maker(torch.randn(len(real), 8))
        opt_critic.zero_grad()
        (softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean()).backward()
        opt_critic.step()
        opt_maker.zero_grad()
        softplus(-critic(made)).mean().backward()
        opt_maker.step()
        if opt_maker.global_step >= 2 * options.steps:
            break
    if world.rank == 0:
        with torch.no_grad():
            radii = maker(torch.randn(2000, 8)).norm(dim=1)
        paceline.log(radius=radii.mean(), off_the_ring=(radii - 1).abs().mean())
if world.rank == 0:
    print(f"points are {(radii - 1).abs().mean():.3f} off the ring")
