"""A small script as users of Hugging Face's Trainer write them; the line that makes it distributed is marked."""

import argparse

import torch
import transformers
from transformers import TrainingArguments

from paceline.transformers import Trainer  # the line: it was imported from transformers

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--padded", action="store_true")
parser.add_argument("--double", action="store_true")
parser.add_argument("--resume")
options = parser.parse_args()

transformers.set_seed(1)
generator = torch.Generator().manual_seed(5)
config = transformers.GPT2Config(
    vocab_size=20, n_positions=12, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = transformers.GPT2LMHeadModel(config)
if options.double:  # Adam makes much of what rounding leaves of gradients that are zero
    model = model.double()


def text() -> dict[str, torch.Tensor]:
    first = int(torch.randint(20, (), generator=generator))
    ids = (first + 3 * torch.arange(12)) % 20
    labels = ids.clone()
    if options.padded:  # texts of unequal length: their tokens count, not the texts
        labels[int(torch.randint(4, 12, (), generator=generator)) :] = -100
    return {"input_ids": ids, "labels": labels}


train, held_out = [text() for _ in range(120)], [text() for _ in range(20)]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulate,
    num_train_epochs=options.epochs,
    learning_rate=0.01,
    max_grad_norm=0.5,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=1,
)
trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model("end")
if trainer.is_world_process_zero():
    print(f"{trainer.state.global_step} steps, eval_loss {trainer.evaluate()['eval_loss']:.4f}")
