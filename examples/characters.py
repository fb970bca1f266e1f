"""A small transformer learns to write, letter by letter. Alone: python examples/characters.py. Together:

    paceline run --workers 2 --policy ssp:staleness=2 examples/characters.py

Each step adds up the gradients of two micro-batches and clips them. The loss is on text it has not trained on.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

CONTEXT, WIDTH, MICRO_BATCHES, HELD_OUT = 64, 64, 2, 2048

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--batch", type=int, default=16, help="windows of text in a micro-batch")
options = parser.parse_args()

world = paceline.init()
torch.manual_seed(0)

text = (Path(__file__).parent / "text" / "relay.txt").read_text()
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
windows = TensorDataset(tokens[:-HELD_OUT].unfold(0, CONTEXT + 1, 1))
held_out = tokens[-HELD_OUT:].unfold(0, CONTEXT + 1, CONTEXT)
loader = DataLoader(windows, options.batch, sampler=paceline.Sampler(windows))
batches = itertools.chain.from_iterable(itertools.repeat(loader))


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(letters), WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, read: Tensor) -> Tensor:
        hidden = self.letter(read) + self.place.weight[: read.shape[1]]
        past = nn.Transformer.generate_square_subsequent_mask(read.shape[1])
        scores: Tensor = self.head(self.layers(hidden, mask=past, is_causal=True))
        return scores

    def loss(self, window: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


model = Writer()
opt = paceline.Optimizer(torch.optim.AdamW(model.parameters(), lr=options.lr), policy="ssp:staleness=2", model=model)

due = 0
while opt.global_step < options.steps:
    opt.zero_grad()
    for (window,) in itertools.islice(batches, MICRO_BATCHES):
        (model.loss(window) / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if world.rank == 0 and opt.global_step >= due:
        due = min(opt.global_step + 50, options.steps)
        loss = model.loss(held_out).item()
        paceline.log(loss=loss)
        print(f"step {opt.global_step}: loss {loss:.2f}")

if world.rank == 0:
    written = tokens[:1]
    with torch.no_grad():
        for _ in range(300):
            scores = model(written[None, -CONTEXT:])[0, -1]
            written = torch.cat([written, torch.multinomial((scores / 0.7).softmax(0), 1)])
    print("".join(letters[token] for token in written))
