"""A small script as users of Lightning write them; the two lines that make it distributed are marked."""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.lightning  # noqa: F401  # the first line

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--clip", type=float)
parser.add_argument("--ckpt")
parser.add_argument("--gan", action="store_true")
options = parser.parse_args()


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), add_dataloader_idx=bool(index))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class GAN(pl.LightningModule):
    """Manual optimization, as in Lightning's own example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        opt_maker, opt_critic = self.optimizers()
        self.toggle_optimizer(opt_maker)
        loss = nn.functional.softplus(-self.critic(self.maker(batch[0].flip(1)))).mean()
        self.manual_backward(loss)
        opt_maker.step()
        opt_maker.zero_grad()
        self.untoggle_optimizer(opt_maker)
        self.toggle_optimizer(opt_critic)
        made = self.maker(batch[0].flip(1)).detach()
        loss = nn.functional.softplus(-self.critic(batch[0])).mean() + nn.functional.softplus(self.critic(made)).mean()
        self.manual_backward(loss)
        opt_critic.step()
        opt_critic.zero_grad()
        self.untoggle_optimizer(opt_critic)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.critic(self.maker(batch[0])).mean())

    def configure_optimizers(self):
        both = [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.9)) for net in (self.maker, self.critic)]
        return both, []


pl.seed_everything(1)
x = torch.randn(240, 4)
train = TensorDataset(x, x.sum(1, keepdim=True).sin())
held_out = TensorDataset(x[:40].roll(1), x[:40].roll(1).sum(1, keepdim=True).sin())
module = GAN() if options.gan else Regression()
trainer = pl.Trainer(
    strategy="paceline",  # the second line
    max_epochs=options.epochs,
    accumulate_grad_batches=options.accumulate,
    precision=options.precision,
    gradient_clip_val=options.clip,
    callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_loss", dirpath="best", filename="best")],
    logger=pl.loggers.CSVLogger("."),
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
loader = DataLoader(train, batch_size=options.batch, shuffle=True, num_workers=options.workers)
trainer.fit(module, loader, DataLoader(held_out, batch_size=40), ckpt_path=options.ckpt)
tested = trainer.validate(module, DataLoader(held_out, batch_size=40), verbose=False)
trainer.save_checkpoint("end.ckpt")
print(f"{trainer.global_step} steps, val_loss {tested[0]['val_loss']:.4f}")
