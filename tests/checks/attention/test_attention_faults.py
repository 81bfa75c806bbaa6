"""Faults of attention planted in small models through their Anatomy, and found by a probe."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import Finding
from tests.models import Built, bert, decoder, gpt2, llama, opt, qwen3, t5

Build = Callable[[], Built]


def findings(built: Built, code: str) -> list[Finding]:
    return [f for f in normprobe.probe(*built).findings if f.code == code]


def loud_queries(built: Built, factor: float) -> Built:
    """Every row of a query projection times `factor`."""
    model = built[0]
    for site in normprobe.probe(*built, level="structure").anatomy.attention:
        rows = site.columns["q"]
        weight = model.get_parameter(rows.parameter)
        with torch.no_grad():
            for start, stop in (span for head in rows.heads for span in head):
                weight.narrow(rows.axis, start, stop - start).mul_(factor)
    return built


@pytest.mark.parametrize("build", [gpt2, llama, bert, lambda: decoder("pre")])
def test_queries_that_are_far_too_large(build: Build) -> None:
    assert not [f for code in ("NP402", "NP403", "NP405") for f in findings(build(), code)]
    built = loud_queries(build(), 3000.0)
    (collapsed,) = findings(built, "NP402")
    assert "have collapsed" in collapsed.message or "has collapsed" in collapsed.message
    (saturated,) = findings(built, "NP403")
    assert "heads are saturated" in saturated.message
    (advice,) = findings(built, "NP405")
    assert "nothing bounds them" in advice.message


class Attention(nn.Module):
    """Attention with norms on queries and keys, and this scale; with new weights."""

    def __init__(self, scale: float, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, width, bias=False) for _ in range(3))
        self.query_norm, self.key_norm, self.scale = nn.RMSNorm(width), nn.RMSNorm(width), scale

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query_norm(self.q(x)) @ self.key_norm(self.k(x)).mT * self.scale
        return logits.softmax(-1) @ self.v(x)  # type: ignore[no-any-return]


def test_norms_on_queries_and_keys_without_a_scale() -> None:
    x = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(1))
    (found,) = findings((Attention(1.0), x), "NP404")
    assert found.severity.value == "warning"
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(16.0, rel=0.1)  # √256
    assert findings((Attention(1 / 16), x), "NP404") == []


def scaled_sites(built: Built, factor: float, only: int | None = None) -> Built:
    """`scaling` of the modules that the Anatomy calls attention times `factor`."""
    sites = normprobe.probe(*built, level="structure").anatomy.attention
    for index, site in enumerate(sites):
        module = built[0].get_submodule(site.path)
        if only in (None, index):
            module.scaling = module.scaling * factor  # type: ignore[assignment,operator]
    return built


@pytest.mark.parametrize("build", [llama, qwen3, bert])
def test_the_scale_of_all_sites(build: Build) -> None:
    site = normprobe.probe(*build(), level="structure").anatomy.attention[0]
    dropped = findings(scaled_sites(build(), site.head_dim**0.5), "NP404")
    assert [f.message.split(":")[0] for f in dropped] == [
        f"the scale is 1, {site.head_dim**0.5:.4g} times 1/√{site.head_dim}"
    ]
    (squared,) = findings(scaled_sites(build(), site.head_dim**-0.5), "NP404")
    assert "the usual factor squared" in squared.message
    assert findings(build(), "NP404") == []


@pytest.mark.parametrize("build", [llama, qwen3, bert])
def test_the_width_of_all_heads_however_few(build: Build) -> None:
    site = normprobe.probe(*build(), level="structure").anatomy.attention[0]
    (found,) = findings(scaled_sites(build(), site.heads**-0.5), "NP404")
    assert found.severity.value == "warning"
    assert f"that of {site.heads} heads together" in found.message


def test_a_scale_that_is_no_finite_number() -> None:
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(1))
    for scale, said in ((math.inf, "inf"), (math.nan, "nan")):
        (found,) = findings((Called(a=scale, b=scale, c=scale), x), "NP404")
        assert found.message == f"the scale is {said}: no logit is a finite number"
        assert (found.severity.value, len(found.every_place)) == ("warning", 3)
        (found,) = findings((Called(a=1 / 8, b=scale, c=1 / 8), x), "NP404")
        assert (found.where, found.message) == ("blocks.b", f"the scale is {said}: no logit is a finite number")


class Called(nn.Module):
    """Pre-norm attention in blocks with these names, each with its own scale."""

    def __init__(self, **scales: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleDict({name: Attention(scale, 64) for name, scale in scales.items()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = x + block(x)
        return x


def test_names_do_not_decide_which_sites_are_alike() -> None:
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(1))
    (found,) = findings((Called(down=1 / 8, mid=1 / 8, up=0.2, last=1 / 8), x), "NP404")
    assert (found.severity.value, found.where) == ("warning", "blocks.up")
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(1.6)
    assert findings((Called(down=1 / 8, mid=1 / 8, up=1 / 8, last=1 / 8), x), "NP404") == []


def test_a_model_that_draws_its_weights_for_no_scale_is_sound() -> None:
    """T5 as it is built; the builder of the tests moves its weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config).eval()
    report = normprobe.probe(model, torch.randint(3, 64, (2, 16)))
    assert report.anatomy.attention[0].scale == 1.0
    assert [f for f in report.findings if f.code == "NP404"] == []


@pytest.mark.parametrize("build", [gpt2, llama, bert, qwen3, t5, lambda: opt(before=True)])
def test_sound_models_raise_no_warning(build: Build) -> None:
    codes = {f.code for f in normprobe.probe(*build()).findings if f.severity.value != "note"}
    assert not codes & {"NP402", "NP403", "NP404", "NP405"}


@pytest.mark.parametrize(("scale", "what"), [(0.0, "sees all keys alike"), (-1 / 16, "match a query least")])
@pytest.mark.parametrize("others", [0, 3])
def test_a_scale_that_is_not_above_zero_is_a_warning(scale: float, what: str, others: int) -> None:
    layers = [Attention(scale), *(Attention(1 / 16, 64) for _ in range(others))]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Linear(layer.v.out_features, 64)) for layer in layers))
    (found,) = (f for f in findings((model, torch.randn(2, 6, 64)), "NP404") if f.severity.value == "warning")
    assert (found.where, found.value) == ("0.0", scale)
    assert what in found.message
