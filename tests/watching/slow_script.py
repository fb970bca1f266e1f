"""A script whose worker 2 is slow from its 40th step on; it trains until it is told to stop."""

import time

import torch

import paceline

world = paceline.init()
torch.manual_seed(0)
model = torch.nn.Linear(20, 1)
x = torch.randn(400, 20)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy="ssp:staleness=3", model=model)
while not opt.done:
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    time.sleep(0.1 if world.rank == 2 and opt.global_step > 40 else 0.02)
    opt.step()
    if world.rank == 0:
        paceline.log(loss=loss.item(), **{"a.very/long_name-of:a@metric": 1.0})
