"""After a probe the model and torch are as before, bit for bit, also when a forward raised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.errors import InputError
from tests.models import MODELS, WIDTH, Built, Mlp, decoder
from tests.trace import Snapshot

EVERY = pytest.mark.parametrize("name", MODELS)


class MidwayError(Exception):
    pass


class Failing:
    """The forward of one module, which raises at its `at`-th run."""

    def __init__(self, forward: Callable[..., Any], at: int) -> None:
        self.forward, self.at, self.runs = forward, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        if self.runs == self.at:
            raise MidwayError("midway")
        return self.forward(*args, **kwargs)


def lived_in(built: Built) -> Built:
    """The model as it may be in use: mixed train flags, gradients, a frozen parameter, hooks."""
    model, inputs = built
    for i, module in enumerate(model.modules()):
        module.training = i % 3 == 0
    first, *others = model.parameters()
    first.requires_grad_(False)
    for parameter in others[::2]:
        parameter.grad = torch.full_like(parameter, 0.5)
    others[0].register_hook(lambda gradient: gradient * 100)
    list(model.modules())[-1].register_forward_hook(lambda m, args, out: None)
    return model, inputs


def middle(model: nn.Module) -> nn.Module:
    """A layer with weights in the middle of the model."""
    layers = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    return layers[len(layers) // 2]


@EVERY
@pytest.mark.parametrize("level", ["structure", "forward", "backward"])
def test_probe(name: str, level: Any) -> None:
    model, inputs = lived_in(MODELS[name]())
    before = Snapshot(model, inputs)
    normprobe.probe(model, inputs, level=level)
    before.assert_kept()


@EVERY
def test_probe_with_all_further_measures(name: str) -> None:
    model, inputs = lived_in(MODELS[name]())
    before = Snapshot(model, inputs)
    normprobe.probe(model, inputs, measures=("all",))
    before.assert_kept()


@EVERY
@pytest.mark.parametrize("at", [1, 2])
def test_forward_that_raises_halfway(name: str, at: int) -> None:
    """In the recorded pass, in the measured one."""
    model, inputs = lived_in(MODELS[name]())
    layer = middle(model)
    failing = layer.forward = Failing(layer.forward, at)
    before = Snapshot(model, inputs)
    with pytest.raises(Exception, match="midway") as caught:
        normprobe.probe(model, inputs, level="backward")
    assert isinstance(caught.value, MidwayError) or isinstance(caught.value.__cause__, MidwayError)
    assert failing.runs == at
    before.assert_kept()


@EVERY
def test_forward_with_gradients_that_raises_halfway(name: str) -> None:
    """The same forward ran without gradients: a model may refuse those, and the rest of the report stands."""
    model, inputs = lived_in(MODELS[name]())
    layer = middle(model)
    failing = layer.forward = Failing(layer.forward, 3)
    before = Snapshot(model, inputs)
    report = normprobe.probe(model, inputs, level="backward")
    assert failing.runs == 3
    assert report.gradients is None
    assert any("MidwayError: midway" in skipped.why for skipped in report.skipped)
    before.assert_kept()


def test_loss_that_raises() -> None:
    model, inputs = lived_in(decoder("pre"))
    before = Snapshot(model, inputs)

    def loss(output: Any, given: Any) -> Tensor:
        raise MidwayError("in the loss")

    with pytest.raises(InputError, match="MidwayError: in the loss"):
        normprobe.probe(model, inputs, level="backward", loss=loss)
    before.assert_kept()


def test_progress_that_raises() -> None:
    model, inputs = lived_in(decoder("pre"))
    before = Snapshot(model, inputs)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "gradients":
            raise MidwayError("interrupted")

    with pytest.raises(MidwayError, match="interrupted"):
        normprobe.probe(model, inputs, level="backward", progress=progress)
    before.assert_kept()


class Stateful(nn.Module):
    """Batch statistics taken even in eval mode, a counter, a cache, spectral norm, dropout, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))  # recomputes its weight in a hook
        self.mlp = Mlp()
        self.last = nn.LayerNorm(WIDTH)
        self.count, self.seen = 0, {}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.norm.num_batches_tracked += 1
        self.seen["last"] = x
        self.kept = x * 2
        y = x.transpose(1, 2)
        y = F.batch_norm(y, self.norm.running_mean, self.norm.running_var, training=True).transpose(1, 2)
        x = x + self.old(self.spectral(y)) + 0.01 * torch.randn_like(x)
        return self.last(x + F.dropout(self.mlp(x), 0.1, training=True))


@pytest.mark.parametrize("level", ["structure", "forward", "backward"])
def test_model_that_changes_itself_in_its_forward(level: Any) -> None:
    model, inputs = lived_in((Stateful(), torch.randn(2, 8, WIDTH)))
    before = Snapshot(model, inputs)
    normprobe.probe(model, inputs, level=level)
    before.assert_kept()


class Writing(nn.Module):
    """Writes into its input, its weights and their gradients, a nested tensor and its config; lets a cache grow."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.mlp, self.last = nn.ReLU(inplace=True), Mlp(), nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(4, WIDTH, max_norm=0.1)
        self.cache, self.config = {"k": [torch.zeros(2)]}, SimpleNamespace(calls=0, inner=SimpleNamespace(log=[]))

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(self.relu(x))
        self.cache["k"][0] += len(seen)
        self.config.calls += 1
        self.config.inner.log.append(1)
        x = x + self.table(torch.arange(x.shape[1]) % 4)
        self.last.bias.data += 1
        if self.last.bias.grad is not None:
            self.last.bias.grad += 1
        return self.last(x + self.mlp(x))


@pytest.mark.parametrize("level", ["structure", "forward", "backward"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_model_that_writes_into_inputs_weights_and_config(level: Any, requires_grad: bool) -> None:
    x = torch.randn(2, 8, WIDTH, requires_grad=requires_grad)
    model, inputs = lived_in((Writing(), (x * 1, [x * 2])))
    before = Snapshot(model, inputs)
    normprobe.probe(model, inputs, level=level)
    before.assert_kept()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_further_measures_of_models_that_change_themselves(requires_grad: bool) -> None:
    x = torch.randn(2, 8, WIDTH, requires_grad=requires_grad)
    for built in ((Stateful(), x * 1), (Writing(), (x * 1, [x * 2]))):
        model, inputs = lived_in(built)
        before = Snapshot(model, inputs)
        normprobe.probe(model, inputs, measures=("all",))
        before.assert_kept()


FRESH = """
import random, torch
torch.manual_seed(0); random.seed(0)
import normprobe
before = random.getstate(), torch.get_rng_state()
normprobe.probe(torch.nn.LayerNorm(4), torch.ones(2, 4))
assert torch.equal(torch.get_rng_state(), before[1]), "torch"
assert random.getstate() == before[0], "python"
"""


def test_first_probe_of_a_process_leaves_random_numbers_alone(root: Path) -> None:
    """What is imported only then may draw some."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_optimiser_steps_on_as_if_nothing_had_been() -> None:
    def trained(probing: bool) -> list[Tensor]:
        model, inputs = decoder("pre", layers=1)
        optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            if probing and step == 1:
                normprobe.probe(model, inputs, level="backward")
            optimiser.zero_grad()
            F.dropout(model(inputs), 0.5).square().mean().backward()
            optimiser.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(5)
    plain = trained(False)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(plain, trained(True), strict=True))


def test_a_trace_would_be_seen() -> None:
    """The comparison finds what a plain run of the stateful model leaves behind."""
    model, inputs = lived_in((Stateful(), torch.randn(2, 8, WIDTH)))
    model.train()
    before = Snapshot(model, inputs)
    model(inputs).sum().backward()
    expected = {
        "rng torch",
        ": keys",
        ": attribute count",
        ": attribute seen",
        "norm: attribute _buffers",
        "old: attribute _buffers",
        "gradient last.weight",
    }
    assert expected <= set(before.changes())


def test_a_trace_of_a_writing_model_would_be_seen() -> None:
    model, inputs = lived_in((Writing(), (torch.randn(2, 8, WIDTH), [])))
    model.last.bias.grad = torch.ones(WIDTH)
    before = Snapshot(model, inputs)
    with torch.no_grad():
        model(*inputs)
    seen = {"inputs", ": attribute cache", ": attribute config", "parameter table.weight", "parameter last.bias"}
    assert seen | {"gradient last.bias"} <= set(before.changes())


class Convolutional(nn.Module):
    """A batch norm, a dropout, and a counter that only train mode moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.head, self.trained = nn.Linear(WIDTH, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.trained += self.training
        x = x + self.norm(self.conv(x))
        return self.head(self.drop(x.mean(-1)))


@pytest.mark.parametrize("measure", ["batchnorm", "norms", "cost", "precision"])
@pytest.mark.parametrize("rows", [1, 4])
def test_measures_of_a_model_with_batch_norm(measure: str, rows: int) -> None:
    model, inputs = lived_in((Convolutional(), torch.randn(rows, WIDTH, 5)))
    before = Snapshot(model, inputs)
    normprobe.probe(model, inputs, measures=(measure,))
    before.assert_kept()


class Counting(nn.Module):
    """A residual block that counts its runs in a parameter of a module in which nothing is watched."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.runs.add_(1)
            return x * 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.count = nn.LayerNorm(WIDTH), Mlp(), self.Count()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.count(x)))


def test_a_parameter_that_is_written_where_nothing_is_watched_is_put_back() -> None:
    model, x = nn.Sequential(Counting(), Counting()), torch.randn(1, 5, WIDTH)
    before = Snapshot(model, x)
    assert normprobe.probe(model, x).measurements.residual
    before.assert_kept()
    assert float(model[0].count.runs) == 0
