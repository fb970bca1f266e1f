"""Trains a small net in a live run and saves its parameters: `gpu_script.py DEVICE OVERLAP FILE POLICY SERVERS PLACE`.

A process of its own, which never touches CUDA: its forks, the workers, do.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import paceline
from paceline import policies
from paceline.core.policy import PeerPolicy


def work(device: str, overlap: bool) -> None:
    torch.manual_seed(0)
    rank = paceline.init().rank
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(144, 300), nn.Tanh(), nn.Linear(300, 3),
    )  # fmt: skip
    model.double().to(device)
    opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model, overlap=overlap)
    for step in range(20):
        opt.zero_grad()
        noise = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(noise.double().to(device)).pow(2).mean()
        (loss * float("nan") if step == 7 and rank == 1 else loss).backward()
        opt.skip_step() if step == 4 else opt.step()
        assert opt.step_was_dropped == (step == 4 or (step == 7 and rank == 1))


def main() -> None:
    device, overlap, file, policy, count, place = sys.argv[1:]
    servers = None if isinstance(policies.parse(policy), PeerPolicy) else int(count)
    run = paceline.launch(
        lambda: work(device, overlap == "True"),
        workers=2, servers=servers, policy=policy, timeout_s=90, servers_on=place,
    )  # fmt: skip
    assert run.failures == [], run.failures
    save_file(dict(run.parameters), file)


if __name__ == "__main__":
    main()
