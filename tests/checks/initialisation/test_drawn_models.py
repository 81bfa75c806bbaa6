"""NP601 to NP606 on small models: the fault planted on several architectures, and the sound model beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.records import Finding, Stream
from tests import models

transformers = pytest.importorskip("transformers")
IDS = {"input_ids": torch.arange(3, 19)[None]}


def gpt2(layers: int = 12) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=96, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def small(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    if kind == "llama":
        config: Any = transformers.LlamaConfig(intermediate_size=160, num_key_value_heads=4, **sizes | more)
        return transformers.LlamaForCausalLM(config).eval()
    return transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=128, **sizes | more)).eval()


MODELS: list[Callable[[], nn.Module]] = [lambda: gpt2(2), lambda: small("llama"), lambda: small("bert")]


def found(model: nn.Module, inputs: Any = IDS, level: Any = "forward") -> list[Finding]:
    return [f for f in probe(model, inputs, level=level).findings if f.code.startswith("NP6")]


def codes(model: nn.Module, inputs: Any = IDS, level: Any = "forward") -> list[str]:
    return list(dict.fromkeys(f.code for f in found(model, inputs, level)))


def stream(model: nn.Module) -> Stream:
    return probe(model, IDS, level="structure").anatomy.streams[0]


def named(model: nn.Module, names: tuple[str, ...]) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if n in names]


@pytest.mark.parametrize("build", MODELS)
def test_fresh_models_are_sound(build: Callable[[], nn.Module]) -> None:
    assert codes(build(), level="backward") == []


def test_gpt2_without_the_scale_of_its_writers() -> None:
    model = gpt2()
    assert codes(model) == []
    with torch.no_grad():
        for branch in stream(model).branches:
            for parameter in named(model, branch.writers):
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
    warned, noted = found(model)
    assert (warned.code, warned.severity.value, noted.code, noted.severity.value) == (
        "NP603",
        "warning",
        "NP602",
        "note",
    )
    assert warned.value == pytest.approx(math.sqrt(24), rel=0.02)
    assert len(warned.places) == 24
    assert "divided by √24" in noted.message


@pytest.mark.parametrize(
    ("init", "how"),
    [
        (nn.init.xavier_uniform_, "drawn by xavier"),
        (lambda w: nn.init.normal_(w, 0.0, 0.3), "drawn with a standard deviation of 0."),
        (lambda w: nn.init.xavier_uniform_(w, gain=24**-0.5), None),
    ],
)
def test_a_deep_stream_drawn_by_other_recipes(init: Callable[[Tensor], Any], how: str | None) -> None:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [models.Block(models.layer_norm, "pre") for _ in range(12)]
    model = models.Decoder(blocks, models.layer_norm()).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "blocks" in name:
            init(parameter)
    notes = [f.message for f in found(model) if f.code == "NP602"]
    assert len(notes) == (how is not None)
    assert all(how in note for note in notes if how is not None)


@pytest.mark.parametrize("build", MODELS)
def test_readers_drawn_otherwise(build: Callable[[], nn.Module]) -> None:
    model = build()
    with torch.no_grad():
        for parameter in named(model, stream(model).branches[1].readers):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    assert codes(model) == ["NP603"]


@pytest.mark.parametrize("build", MODELS)
def test_constant_weights_and_equal_rows(build: Callable[[], nn.Module]) -> None:
    for constant in (True, False):
        model = build()
        (weight, *_) = [p for p in named(model, stream(model).branches[0].writers) if p.dim() > 1]
        outputs = next(
            w.output_axis
            for w in probe(model, IDS, level="structure").anatomy.weights
            if (model.get_parameter(w.parameter) is weight)
        )
        with torch.no_grad():
            if constant:
                weight.fill_(0.01)
            else:
                weight.copy_(weight.narrow(outputs, 0, 1).expand_as(weight))
        assert "NP605" in codes(model)


@pytest.mark.parametrize("build", [lambda: gpt2(2), lambda: small("llama")])
def test_zeros_in_a_row_block_the_gradient(build: Callable[[], nn.Module]) -> None:
    """Writers of zero alone are a sound start; readers and writers of zero are not."""
    model = build()
    branch = stream(model).branches[0]
    for names, expected in ((branch.writers, False), (branch.readers, True)):
        with torch.no_grad():
            for parameter in named(model, names):
                parameter.zero_()
        blocked = [f for f in found(model, level="backward") if f.code == "NP606"]
        assert [f.severity.value for f in blocked] == (["error"] if expected else [])


class Scaled(nn.Module):
    """Branches that a learned factor of 0 starts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.maps = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear, scale in zip(self.norms, self.maps, self.scales, strict=True):
            x = x + scale * linear(norm(x))
        return self.head(self.norm(x))


def test_a_factor_of_zero_on_a_branch_of_zeros() -> None:
    model, x = Scaled(), torch.randn(2, 5, 32)
    assert codes(model, x, "backward") == []
    with torch.no_grad():
        model.maps[1].weight.zero_()
        model.maps[1].bias.zero_()
    (blocked,) = [f for f in found(model, x) if f.code == "NP606"]
    assert blocked.message.startswith("maps.1.weight and scales.1 are 0 and stay so")


class Conditioned(nn.Module):
    """Branches whose gate, or scale and offset, a second input makes from weights of zeros (Peebles & Xie 2023)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, count = form, 3
        self.norms = nn.ModuleList(nn.LayerNorm(32, elementwise_affine=False) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(count))
        self.made = nn.ModuleList(nn.Linear(5, 96) for _ in range(count))
        for layer in self.made:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        for norm, up, down, made in zip(self.norms, self.up, self.down, self.made, strict=True):
            gate, scale, shift = made(nn.functional.silu(given))[:, None].chunk(3, -1)
            if self.form == "adaln":
                x = x + gate * down(nn.functional.gelu(up(norm(x) * (1 + scale) + shift)))
            elif self.form == "film":
                x = x + (scale * down(nn.functional.gelu(up(norm(x)))) + shift)
            else:
                x = x + torch.tanh(gate) * down(nn.functional.gelu(up(norm(x))))
        return self.head(self.norm(x))


@pytest.mark.parametrize("form", ["adaln", "film", "gate"])
def test_branches_that_another_input_opens(form: str) -> None:
    """The gate's weights are 0 and get a gradient, what is behind them gets its own then; a detached one never does."""
    model = Conditioned(form).eval()
    inputs = torch.randn(2, 5, 32), torch.randn(2, 5)
    report = probe(model, inputs, level="backward")
    assert [f for f in report.findings if f.code == "NP606"] == []
    assert report.init is not None
    assert [index for _, index in report.init.closed] == [0, 1, 2]
    for layer in model.made:
        nn.init.normal_(layer.weight)
    opened = probe(model, inputs, level="backward")
    assert opened.init is not None
    assert opened.init.closed == ()
    model.down[1].register_forward_hook(lambda *call: call[-1].detach())
    (idle,) = [f for f in probe(model, inputs, level="backward").findings if f.code == "NP606"]
    assert (idle.severity.value, idle.message) == (
        "warning",
        "none of its parameters gets a gradient, though one reaches its add",
    )


def relu(
    init: Callable[[Tensor], Any], norm: bool = False, act: Callable[[], nn.Module] = nn.ReLU, first: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    rows: list[nn.Module] = [nn.LayerNorm(64)] if first else []
    for _ in range(8):
        rows += [nn.Linear(64, 64), *([nn.LayerNorm(64)] if norm else []), act()]
    model = nn.Sequential(*rows, nn.Linear(64, 8))
    for layer in model:
        if isinstance(layer, nn.Linear):
            init(layer.weight)
    return model.eval()


@pytest.mark.parametrize(
    ("init", "norm", "expected"),
    [
        (nn.init.xavier_uniform_, False, [("NP601", "warning")]),
        (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)), False, [("NP601", "note")]),
        (lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"), False, []),
        (nn.init.xavier_uniform_, True, []),
    ],
)
def test_gains_before_relu(init: Any, norm: bool, expected: list[tuple[str, str]]) -> None:
    model = relu(init, norm)
    assert [(f.code, f.severity.value) for f in found(model, torch.randn(4, 64))] == expected


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.GELU, Gelu, nn.SiLU, lambda: nn.LeakyReLU(0.2)])
def test_rows_before_any_kin_of_relu(act: Callable[[], nn.Module], first: bool) -> None:
    (fading,) = found(relu(nn.init.xavier_uniform_, act=act, first=first), torch.randn(4, 64))
    assert (fading.code, fading.severity.value, len(fading.places)) == ("NP601", "warning", 8)
    assert found(relu(nn.init.xavier_uniform_, norm=True, act=act, first=first), torch.randn(4, 64)) == []


def test_the_share_that_is_left_is_that_of_the_signal() -> None:
    """Layers without biases before a leaky ReLU: the product is what a forward gives."""
    torch.manual_seed(0)
    rows = [layer for _ in range(6) for layer in (nn.Linear(256, 256, bias=False), nn.LeakyReLU(0.3))]
    model, x = nn.Sequential(*rows).eval(), torch.randn(64, 256)
    for layer in model[::2]:
        nn.init.xavier_normal_(layer.weight)
    (fading,) = found(model, x)
    assert isinstance(fading.value, float)
    with torch.no_grad():
        assert fading.value == pytest.approx(float(model(x).square().mean().sqrt()), rel=0.1)
    with torch.no_grad():
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight, a=0.3)
    assert found(model, x) == []


class Transposed(nn.Module):
    """A gelu stack whose weights are stored as [in, out], with widths that go up and down."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ParameterList(nn.Parameter(torch.empty(64, 256)) for _ in range(3))
        self.down = nn.ParameterList(nn.Parameter(torch.empty(256, 64)) for _ in range(3))
        for weight in (*self.up, *self.down):
            nn.init.kaiming_normal_(weight if swapped else weight.T, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = (x @ up).relu() @ down
        return x


def test_a_fan_that_was_read_off_the_wrong_axis() -> None:
    x = torch.randn(5, 64)
    assert codes(Transposed(False), x) == []
    assert codes(Transposed(True), x)[-1:] == ["NP604"]
