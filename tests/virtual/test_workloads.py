"""The workloads learn, read their data, and say in one line what is wrong with a user's own."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline import cli, simulate, workloads
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.virtual.gradients import Batched, Gradients, OneByOne
from paceline.tensors.layout import flatten, layout_of
from paceline.workloads import digits, factorization
from paceline.workloads.base import Workload

LEARNS = {"digits-mlp": 0.85, "digits-cnn": 0.9, "svm": 0.7}
"""Accuracy after 150 iterations of 4 workers."""


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)


def test_the_digits_are_those_of_scikit_learn(monkeypatch) -> None:
    from_file = digits.load_digits()
    monkeypatch.setattr(digits, "FILE", "nowhere")
    from_sklearn = digits.load_digits()
    for ours, theirs in zip(from_file, from_sklearn, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    (images, labels), (test_images, _) = from_file
    assert len(images) + len(test_images) == 1797
    assert images.max() == 1.0
    assert labels.unique().tolist() == list(range(10))


def test_without_scikit_learn_there_are_no_digits_and_one_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[data\]'"):
        digits.load_digits()


@pytest.mark.parametrize("name", LEARNS)
@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3"])
def test_a_bundled_workload_learns(name: str, policy: str) -> None:
    run = simulate(name, policy, workers=4, servers=2, iterations=150)
    assert run.history[-1].accuracy > LEARNS[name]
    assert run.history[-1].loss < 0.9 * run.history[0].loss


TINY = "char-transformer:width=16,layers=1,context=16"


def test_the_transformer_learns_letters_in_virtual_time_and_live(capsys) -> None:
    line = f"--workload {TINY} --workers 2 --iterations 60 --optimizer adam:lr=0.01"
    assert cli.run(["simulate", *line.split()]) == 0
    assert "data: 19956 letters that ship with it" in capsys.readouterr().out
    assert cli.run(["compare", "bsp", "--live", *line.split()]) == 0
    run = simulate(TINY, workers=2, iterations=60, optimizer="adam:lr=0.01")
    assert run.config["workload"] == TINY
    assert run.history[-1].loss < 0.8 * run.history[0].loss
    assert run.history[-1].accuracy > 0.2, "a blank is every sixth letter"


def test_the_transformer_sees_no_letter_to_come() -> None:
    workload = workloads.load(TINY)
    module = workload.module(0)
    read = workload.train[0][:2]
    assert torch.equal(workload.train[0][1:5], workload.train[1][:4]), "the target is the next letter"
    for place in (1, 7, 15):
        changed = read.clone()
        changed[:, place] = (changed[:, place] + 1) % 10
        differs = (module(changed) - module(read)).abs().amax((0, 1)) > 1e-6
        assert not differs[:place].any()
        assert differs[place:].any()


def test_the_transformer_has_a_large_form_and_reads_a_text_of_yours(monkeypatch, tmp_path) -> None:
    with pytest.raises(ConfigError, match="width=18 is not a multiple of 4"):
        workloads.load("char-transformer:width=18")
    with pytest.raises(ConfigError, match="no parameter 'depth'"):
        workloads.load("char-transformer:depth=3")
    large = workloads.load("char-transformer:width=256,layers=4").module(0)
    assert sum(parameter.numel() for parameter in large.parameters()) > 3_000_000
    (tmp_path / "input.txt").write_text("ab" * 1500)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    mine = workloads.load(TINY)
    assert mine.data == f"3000 letters of {tmp_path / 'input.txt'}"
    assert set(mine.train[0].flatten().tolist()) == {0, 1}
    (tmp_path / "input.txt").write_text("ab" * 1000)
    with pytest.raises(ConfigError, match="has 2000 letters: with context=16 more than 2065 are needed"):
        workloads.load(TINY)


def test_matrix_factorization_learns_and_says_what_it_used(capsys, tmp_path) -> None:
    path = tmp_path / "out.json"
    line = f"simulate --policy bsp --workload matrix-factorization --workers 8 --iterations 150 --json {path}"
    assert cli.run(line.split()) == 0
    assert "data: 12000 synthetic low-rank ratings" in capsys.readouterr().out
    assert '"data": "12000 synthetic low-rank ratings"' in path.read_text()
    run = simulate("matrix-factorization", workers=8, iterations=150)
    assert run.history[-1].loss < 0.5 * run.history[0].loss


def test_matrix_factorization_reads_movielens(monkeypatch, tmp_path) -> None:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    lines = [
        f"{user * 10}\t{film * 7}\t{1 + (user + film) % 5}\t88125094{user}" for user in range(9) for film in range(8)
    ]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    workload = workloads.load("matrix-factorization")
    assert workload.data == f"72 ratings of {folder / 'u.data'}"
    assert len(workload.train[0]) + len(workload.test[0]) == 72
    module = workload.module(0)
    assert module.user.weight.shape[0] == 9, "users are numbered anew, without gaps"
    assert module.film.weight.shape[0] == 8
    assert sorted(set(workload.train[1].tolist())) == [1, 2, 3, 4, 5]
    (folder / "u.data").write_text("1\t2\tthree\t4\n")
    with pytest.raises(ConfigError, match=r"u\.data:1 is not 'user film rating time'"):
        workloads.load("matrix-factorization")


def write_idx(path: Path, values: np.ndarray) -> None:
    raw = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_fashion(folder: Path, suffix: str = "") -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 20)):
        images = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", random.integers(0, 10, count, dtype=np.uint8))


@pytest.mark.parametrize("sub", ["", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_reads_idx_files_and_trains(monkeypatch, tmp_path, suffix: str, sub: str) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    (tmp_path / sub).mkdir(exist_ok=True)
    write_fashion(tmp_path / sub, suffix)
    workload = workloads.load("fashion-cnn")
    assert workload.train[0].shape == (64, 1, 28, 28)
    assert 0.99 < workload.train[0].max() <= 1
    run = simulate(workload, "bsp", workers=2, batch=8, iterations=30, optimizer="sgd:lr=0.1")
    assert run.history[-1].loss != run.history[0].loss


@pytest.mark.parametrize("name", ["fashion-cnn", "fashion-resnet20", "fashion-vgg:connected=64"])
def test_fashion_without_data_says_what_to_install(monkeypatch, tmp_path, capsys, name: str) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    monkeypatch.setattr("paceline.workloads.data_files.SYSTEM", tmp_path / "nowhere")
    assert cli.run(["simulate", "--workload", name]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "apt-get install dataset-fashion-mnist" in err
    assert str(tmp_path) in err


def test_fashion_files_that_are_cut_short_or_do_not_belong_together(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    write_fashion(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="not a whole idx file"):
        workloads.load("fashion-cnn")
    write_idx(labels, np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match="do not belong together"):
        workloads.load("fashion-cnn")


@pytest.mark.ci
def test_synthetic_images_need_no_files_and_can_be_told_apart(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("paceline.workloads.data_files.SYSTEM", tmp_path / "nowhere")
    line = "simulate --workload fashion-cnn:data=synthetic --workers 2 --iterations 60"
    assert cli.run(line.split()) == 0
    assert "data: 10000 synthetic images" in capsys.readouterr().out
    workload = workloads.load("fashion-cnn:data=synthetic")
    images, labels = workload.train
    assert images.shape == (10_000, 1, 28, 28)
    assert 0 <= images.min() < images.max() <= 1
    assert torch.equal(images, workloads.load("fashion-vgg:data=synthetic").train[0]), "the same each time"
    assert sorted(labels.unique().tolist()) == list(range(10))
    assert simulate(workload, workers=2, iterations=60).history[-1].accuracy > 0.9
    with pytest.raises(ConfigError, match="fashion-cnn:data=mine is not one of fashion-mnist, synthetic"):
        workloads.load("fashion-cnn:data=mine")


def test_the_networks_are_what_their_names_say() -> None:
    def weights(name: str) -> list[int]:
        module = workloads.load(name).module(0)
        assert not list(module.buffers()), "nothing that vmap could not batch"
        return [parameter.numel() for parameter in module.parameters() if parameter.dim() > 1]

    resnet = workloads.load("fashion-resnet20:data=synthetic").module(0)
    deep = [each for each in resnet.modules() if isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3)]
    assert len(deep) + 1 == 20, "with the last layer"
    assert 265_000 < sum(weights("fashion-resnet20:data=synthetic")) < 275_000
    assert sum(weights("fashion-resnet20:data=synthetic,width=8")) < 70_000
    assert sum(weights("fashion-vgg:data=synthetic")) > 2_500_000
    narrow = workloads.load("fashion-vgg:data=synthetic,connected=64").module(0)
    assert [each.out_features for each in narrow.modules() if isinstance(each, nn.Linear)] == [64, 64, 10]
    with pytest.raises(ConfigError, match="width=12 is not a multiple of 8"):
        workloads.load("fashion-resnet20:width=12")


def test_synthetic_ratings_have_movielens_sizes(monkeypatch) -> None:
    workload = workloads.load("matrix-factorization:data=100k,rank=4")
    pairs = torch.cat([workload.train[0], workload.test[0]])
    assert workload.data == "100000 synthetic low-rank ratings"
    assert len(pairs) == len(pairs.unique(dim=0)) == 100_000
    assert [int(number) for number in pairs.amax(0)] == [942, 1681]
    assert workload.module(0).film.weight.shape == (1682, 4)
    monkeypatch.setattr(factorization, "LISTED", 50)
    drawn = factorization.draw_without_repetition(300, 200, torch.Generator().manual_seed(0))
    assert len(drawn) == len(drawn.unique()) == 200
    assert drawn.max() < 300
    assert not torch.equal(drawn, drawn.sort().values)


# Gradients: batched or not, they are the same.


def gradients_of(
    workload: Workload, rows: int, compute: type[Batched] | type[OneByOne], times: int = 1
) -> torch.Tensor:
    module = workload.module(0, torch.float64)
    layout = layout_of((name, value, 0) for name, value in module.named_parameters())
    flat = layout.empty()
    flatten(list(module.parameters()), layout.views(flat))
    generator = torch.Generator().manual_seed(1)
    parameters = flat + 0.01 * torch.randn(rows, layout.numel, generator=generator, dtype=torch.float64)
    samples = torch.randint(0, len(workload.train[0]), (rows, 5), generator=generator)
    x, y = (t.double() if t.is_floating_point() else t for t in (part[samples] for part in workload.train))
    made = compute(workload, module, layout)
    for _ in range(times):
        found = made(parameters, x, y)
    return found


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", TINY, "svm", "matrix-factorization", "quadratic"])
def test_batched_gradients_are_those_of_the_plain_loop(name: str) -> None:
    workload = workloads.load(name)
    plain = gradients_of(workload, 3, OneByOne)
    assert torch.allclose(gradients_of(workload, 3, Batched), plain, atol=1e-12)
    assert torch.allclose(gradients_of(workload, 3, Batched, times=31), plain, atol=1e-12), "traced"


@pytest.mark.parametrize("name", ["fashion-resnet20:data=synthetic,width=8", "fashion-vgg:data=synthetic,connected=16"])
def test_batched_gradients_of_deep_networks_are_those_of_the_plain_loop(name: str) -> None:
    workload = workloads.load(name)
    assert torch.allclose(gradients_of(workload, 2, Batched), gradients_of(workload, 2, OneByOne), atol=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def digits_with(make_module) -> Workload:
    digits = workloads.load("digits-mlp")
    return Workload("other", make_module, digits.loss, digits.train, digits.test, 32, "sgd:lr=0.1")


def test_what_cannot_be_batched_is_computed_one_by_one() -> None:
    run = simulate(digits_with(Normed), "bsp", workers=4, iterations=60)
    assert run.history[-1].accuracy > 0.8, "evaluated with the running statistics"
    assert run.others["body.1.num_batches_tracked"] >= 200
    assert not torch.equal(run.others["body.1.running_mean"], torch.zeros(16))


def test_evaluating_changes_nothing() -> None:
    workload = digits_with(Normed)
    module = workload.module(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    workload.evaluate(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training


def test_dropout_is_the_same_for_the_same_seed_only() -> None:
    workload = digits_with(lambda: nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)))
    finals = []
    for other, seed in enumerate((0, 0, 1)):
        torch.manual_seed(other)  # what the program drew before is no matter
        finals.append(simulate(workload, "asp", workers=3, iterations=10, seed=seed).parameters)
    assert torch.equal(finals[0]["0.weight"], finals[1]["0.weight"])
    assert not torch.equal(finals[0]["0.weight"], finals[2]["0.weight"])


def test_a_module_that_fails_is_one_line() -> None:
    with pytest.raises(PacelineError, match="the module or the loss of other failed: RuntimeError: mat1 and mat2"):
        compute_on(digits_with(lambda: nn.Linear(63, 10)))


def compute_on(workload: Workload) -> None:
    module = workload.module(0)
    layout = layout_of((name, value, 0) for name, value in module.named_parameters())
    gradients = Gradients(workload, module, layout, layout.slices(1))
    gradients.order((0, 0, 0), torch.zeros(layout.numel), np.arange(4))
    gradients._compute()


# A user's own.

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 5, generator=generator)

class MyWorkload:
    batch = 16
    optimizer = "sgd:lr=0.2"

    def __init__(self):
        self.train = TensorDataset(x, (x.sum(1) > 0).long())

    def make_module(self):
        return nn.Linear(5, 2)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

class Regression(MyWorkload):
    def __init__(self):
        self.train = (x, x.sum(1, keepdim=True))
        self.test = (x[:50], x[:50].sum(1, keepdim=True))

    def make_module(self):
        return nn.Linear(5, 1)

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)

class NoLoss:
    train = (x, x)
    make_module = MyWorkload.make_module

class SumLoss(MyWorkload):
    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

class WrongShape(MyWorkload):
    def make_module(self):
        return nn.Linear(4, 2)

class BigBatch(MyWorkload):
    batch = 1000

class Odd(MyWorkload):
    def __init__(self):
        self.train = (x, x[:3])

def broken():
    return 1 / 0

number = 3
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_users_own_workload_in_compare_and_live(mine, capsys) -> None:
    line = f"compare bsp asp --workload {mine}:MyWorkload --workers 2 --iterations 40 --target accuracy=0.85"
    assert cli.run(line.split()) == 0
    assert "missed" not in capsys.readouterr().out
    assert cli.run([*line.split(), "--live"]) == 0
    assert "missed" not in capsys.readouterr().out


def test_metrics_follow_the_targets(mine) -> None:
    run = simulate(f"{mine}:Regression", workers=2, iterations=60)
    assert run.history[-1].accuracy is None
    assert run.history[-1].loss < 0.01


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "lacks a name: write FILE.py:NAME"),
        ("Nothing", "there is no Nothing in"),
        ("NoLoss", "it lacks loss"),
        ("SumLoss", "must give the mean over the batch"),
        ("WrongShape", "RuntimeError: mat1 and mat2"),
        ("BigBatch", "batch=1000 is out of range: 1 to 200"),
        ("Odd", "as many inputs as targets"),
        ("broken", "ZeroDivisionError"),
        ("number", "it lacks make_module, loss, train"),
    ],
)
def test_a_wrong_workload_gets_one_line_and_exit_2(mine, name: str, said: str, capsys) -> None:
    assert cli.run(["simulate", "--workload", f"{mine}:{name}"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"), [("x = (", "bad.py:1 failed: SyntaxError"), ("\nimport nowhere_at_all", "bad.py:2 failed: Mod")]
)
def test_a_file_that_does_not_run_gets_one_line(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        workloads.load(f"{path}:Mine")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="there is no file"):
        workloads.load(f"{tmp_path}/gone.py:Mine")
