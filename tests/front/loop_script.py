"""A training script for one process, as many are written; `test_porting.py` makes it distributed in a few lines.

Settings are globals that the command line overrides; the rate is set at each iteration; the master process evaluates
and saves; two groups of parameters; the norm of the gradient is clipped.
"""

import sys

import torch
from torch import nn

batch_size = 8
grad_clip = 0.0
max_iters = 12
eval_interval = 4
for each in sys.argv[1:]:
    name, _, value = each.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)

master_process = True
torch.manual_seed(3)
truth = torch.linspace(-2, 2, 6)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
groups = [
    {"params": [tensor for tensor in model.parameters() if tensor.dim() == 2], "weight_decay": 0.1},
    {"params": [tensor for tensor in model.parameters() if tensor.dim() == 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=0.1)
iter_num = 0


def get_batch():
    x = torch.randn(batch_size, 6)
    return x, (x @ truth).unsqueeze(1)


@torch.no_grad()
def evaluate():
    model.eval()
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    loss = (model(x) - (x @ truth).unsqueeze(1)).pow(2).mean()
    model.train()
    return loss.item()


while True:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + 0.1 * iter_num)
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: held-out loss {evaluate():.4f}")
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(saved, "checkpoint.pt")
    x, y = get_batch()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    if grad_clip:
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    print(f"iter {iter_num}: loss {loss.item():.6f}")
    iter_num += 1
    if iter_num > max_iters:
        break
