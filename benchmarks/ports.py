"""Two well-known training scripts with at most eight changed lines, under many policies:

    git clone https://github.com/karpathy/nanoGPT; git clone https://github.com/pytorch/examples
    apt-get install dataset-fashion-mnist
    python benchmarks/ports.py --nanogpt nanoGPT --mnist examples

The changed lines are printed as a diff. Then nanoGPT's train.py and PyTorch's mnist example are trained, small: in one
process on the joined batch; on three workers under bsp with the mean gradient clipped, which must be equal to the
fourth decimal of the loss at each step; on three workers under other policies. The command exits with 1 if a claim does
not hold. The checkouts are only read. Where there is no torchvision, `stand_in/` has what the example uses of it, with
Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from array import array
from functools import cache
from itertools import chain
from pathlib import Path

from porting import Claim, Edit, Port, Row, Runner, changed_lines, compare, diff, train_under

from paceline.errors import PacelineError
from paceline.workloads.data_files import VARIABLE, find, folders, read_bytes
from paceline.workloads.fashion import FOLDER, load_fashion

MOST_CHANGED = 8
WORKERS, STEPS, EPOCHS, BATCH, FEW = 3, 30, 2, 12, 2
POLICIES = (
    "bsp", "ssp:staleness=2", "asp", "backup:extra=1", "deadline", "elastic:lookahead=5", "hop:graph=complete",
    "adpsgd:graph=complete",
)  # fmt: skip
SCENARIO = "random-slowdown:factor=4"
HERE = Path(__file__).parent
TEXT = HERE.parent / "examples" / "text" / "relay.txt"
VOCABULARY = b"(dVvocab_size\nI256\ns."
"""{"vocab_size": 256}, where and as nanoGPT looks for it: a pickle, by hand. We read none."""


def write_tokens(folder: Path) -> None:
    """A text as nanoGPT's data: a byte is a token."""
    tokens = array("H", list(TEXT.read_bytes()))
    cut = len(tokens) * 9 // 10
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    for name, part in (("train.bin", tokens[:cut]), ("val.bin", tokens[cut:])):
        (data / name).write_bytes(part.tobytes())
    (data / "meta.pkl").write_bytes(VOCABULARY)


@cache
def first_images() -> dict[str, bytes]:
    """The first of Fashion-MNIST's images, as files of the same kind: so many that an epoch is half of the steps."""
    load_fashion()  # says what to install
    files = {}
    for part, count in (("train", WORKERS * BATCH * STEPS // EPOCHS), ("t10k", 500)):
        for name, header in ((f"{part}-images-idx3-ubyte", 16), (f"{part}-labels-idx1-ubyte", 8)):
            path = find(name, folders(FOLDER))
            assert path is not None
            raw = read_bytes(path)
            size = (len(raw) - header) // int.from_bytes(raw[4:8])
            files[name] = raw[:4] + count.to_bytes(4) + raw[8 : header + count * size]
    return files


def write_images(folder: Path) -> None:
    (folder / "data").mkdir()
    for name, content in first_images().items():
        (folder / "data" / name).write_bytes(content)


NANOGPT = Port(
    name="nanoGPT",
    script="train.py",
    beside=("model.py", "configurator.py"),
    edits=(
        Edit("after", "import numpy as np", "import paceline"),
        Edit("before", "grad_clip = 1.0", "clip_mean = 0.0 # the servers clip the mean gradient; then grad_clip=0.0"),
        Edit("replace", "master_process = True", "master_process = (world := paceline.init()).rank == 0"),
        Edit("replace", "(batch_size,))", "(world.size, batch_size))[world.rank]"),
        Edit("before", "def estimate_loss", "@torch.random.fork_rng()"),
        Edit(
            "before", "checkpoint = None",
            "optimizer = paceline.Optimizer("
            "optimizer, model=model, options=f'clip_mean={clip_mean}' if clip_mean else '')",
        ),
        Edit("after", "scaler.update()", "paceline.log(loss=loss.item() * gradient_accumulation_steps)"),
        Edit(
            "replace", "    iter_num += 1",
            "    iter_num = due if (due := optimizer.global_step // eval_interval * eval_interval) > iter_num "
            "else max(iter_num + 1, optimizer.global_step)",
        ),
    ),
    arguments=(
        "--dataset=tiny", "--device=cpu", "--compile=False", "--dtype=float32", "--n_layer=2", "--n_head=2",
        "--n_embd=64", "--block_size=64", "--gradient_accumulation_steps=1", f"--max_iters={STEPS}",
        f"--lr_decay_iters={STEPS}", "--warmup_iters=5", "--eval_interval=10", "--learning_rate=2e-3",
    ),
    # Without evaluation, which draws from the same numbers; few samples, so that workers' gradients differ.
    joined=(f"--batch_size={WORKERS * FEW}", "--eval_iters=0", "--grad_clip=0.25"),
    mean_clipped=(f"--batch_size={FEW}", "--eval_iters=5", "--grad_clip=0.0", "--clip_mean=0.25"),
    each_clipped=(f"--batch_size={FEW}", "--eval_iters=5", "--grad_clip=0.25"),
    step_loss=re.compile(r"iter (\d+): loss ([\d.]+)"),
    end_loss=re.compile(r"val loss ([\d.]+)"),
    enough=4.4,
    logs=True,
    model="out/ckpt.pt",
    evaluated_again=("--init_from=resume", "--eval_iters=5"),
    prepare=write_tokens,
)  # fmt: skip

MNIST = Port(
    name="mnist",
    script="mnist/main.py",
    edits=(
        Edit("after", "import argparse", "import paceline"),
        Edit("before", "args = parser.parse_args()", "parser.add_argument('--options', default='')"),
        Edit("before", "torch.manual_seed(args.seed)", "world = paceline.init()"),
        Edit("replace", "train_kwargs.update(accel_kwargs)", "train_kwargs.update(accel_kwargs, shuffle=False)"),
        Edit("replace", "DataLoader(dataset1,", "DataLoader(dataset1, sampler=paceline.Sampler(dataset1), "),
        Edit(
            "after", "optimizer = optim.",
            "optimizer = paceline.Optimizer(optimizer, model=model, options=args.options)",
        ),
        Edit("replace", "        test(model", "        if world.rank == 0: test(model"),
        Edit("replace", "if args.save_model", "if args.save_model and world.rank == 0"),
    ),
    both=(
        Edit("replace", "nn.Dropout(0.25)", "nn.Dropout(0.0)"),
        Edit("replace", "nn.Dropout(0.5)", "nn.Dropout(0.0)"),
        # torch's norm of a million 32-bit floats is off by some 1e-5 on the CPU, so that one process clips otherwise
        Edit("after", "torch.manual_seed(args.seed)", "torch.set_default_dtype(torch.float64)"),
    ),
    is_its_own_reference=True,  # its own order of the data is another
    arguments=("--no-accel", f"--epochs={EPOCHS}", "--log-interval=1", "--test-batch-size=250", "--save-model"),
    joined=(f"--batch-size={WORKERS * BATCH}", "--options=clip_mean=0.5"),
    mean_clipped=(f"--batch-size={BATCH}", "--options=clip_mean=0.5"),
    each_clipped=(f"--batch-size={BATCH}", "--options=clip=0.5"),
    step_loss=re.compile(r"Train Epoch: (\d+) \[(\d+)/.*?Loss: (\d+\.\d+)"),
    end_loss=re.compile(r"Average loss: ([\d.]+)"),
    enough=1.7,
    model="mnist_cnn.pt",
    environment={"PYTHONPATH": str(HERE / "stand_in"), VARIABLE: "data"},
    prepare=write_images,
)  # fmt: skip


def show(row: Row) -> None:
    cells = ("-" if value is None else f"{value:.4f}" if name == "end_loss" else f"{value:.1f}" if name == "seconds"
             else value for name, value in row._asdict().items())  # fmt: skip
    print("{:8} {:26} {:>8} {:>10} {:>8} {:>8} {:>9}".format(*cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", metavar="DIR", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--mnist", metavar="DIR", type=Path, help="a checkout of pytorch/examples")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--cluster", default=SCENARIO, help="the scenario in which the policies are run")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="where what was run stays")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    given = [(port, place) for port, place in ((NANOGPT, options.nanogpt), (MNIST, options.mnist)) if place is not None]
    if not given:
        parser.error("name a checkout: --nanogpt DIR, --mnist DIR, or both")
    claims: list[Claim] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="paceline-ports-") as scratch:
        try:
            folder = options.keep or Path(scratch)
            runners = [Runner(port, place.resolve(), folder.resolve() / port.name, WORKERS) for port, place in given]
            if options.mnist is not None:
                first_images()
        except PacelineError as error:
            parser.exit(2, f"ports.py: {error}\n")
        for runner in runners:
            count = changed_lines(runner.source, runner.ported)
            print(diff(runner.source, runner.ported, runner.port.script))
            claims.append(Claim(f"{runner.port.name}: {count} changed lines", count <= MOST_CHANGED))
        print("\n{:8} {:26} {:>8} {:>10} {:>8} {:>8} {:>9}".format(*(name.replace("_", " ") for name in Row._fields)))
        for runner in runners:
            policies = train_under(runner, options.policies, ("--cluster", options.cluster))
            for each in chain(compare(runner), policies):
                if isinstance(each, Row):
                    show(each)
                    rows.append(each)
                else:
                    claims.append(each)
    print()
    for claim in claims:
        print(f"{'ok ' if claim.holds else 'NOT'} {claim.text}")
    if options.json is not None:
        found = {"rows": [row._asdict() for row in rows], "claims": [claim._asdict() for claim in claims]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
