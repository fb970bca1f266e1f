"""A small loop as users of Accelerate write them; the line that makes it distributed is marked."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.accelerate import Accelerator  # the line: it was imported from accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
options = parser.parse_args()

torch.manual_seed(1)
x = torch.randn(122, 4)
train = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.5)

accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=True)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(train, batch_size=options.batch, shuffle=True), scheduler
)
held_out = accelerator.prepare(DataLoader(TensorDataset(*train[:40]), batch_size=20))
for _ in range(3):
    model.train()
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.wait_for_everyone()
model.eval()
with torch.no_grad():
    losses = [nn.functional.mse_loss(model(batch), target) for batch, target in held_out]
losses = accelerator.gather_for_metrics(torch.stack(losses))
accelerator.print(f"held-out loss {losses.mean():.4f}")
if accelerator.is_main_process:
    accelerator.save_model(model, "end")
