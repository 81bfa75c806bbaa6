"""Numbers and formulas that rewrites take from the literature, held one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normprobe.rewrites import (
    AddFinalNorm,
    FoldBatchNorm,
    Initialise,
    RemoveNorms,
    ScaleResidual,
    Survey,
    ToDyT,
    make_plan,
)
from normprobe.rewrites.initialise.stacks import t_fixup_factors
from normprobe.rewrites.reparametrise.forms import StandardisedRows
from tests import models
from tests.rewrites.cases import applied
from tests.rewrites.rewritten import cnn


def test_t_fixup_of_a_stack_alone_is_that_of_an_encoder() -> None:
    """Huang et al. 2020, sec. 3.2: 0.67 L^(−1/4)."""
    model, inputs = models.gpt2()
    factors = t_fixup_factors(Survey.of(model, inputs).anatomy)
    assert factors["transformer.h.1.mlp.c_fc.weight"] == pytest.approx(0.67 * models.LAYERS**-0.25, rel=1e-12)
    assert factors["transformer.wte.weight"] == pytest.approx(0.67 * models.LAYERS**-0.25, rel=1e-12)


def test_small_initialisation_has_its_formulas() -> None:
    """Nguyen & Salazar 2019: √(2 / (5 d)); Wang & Komatsuzaki 2021: writers 2 / (L √d), L the number of layers."""
    model, inputs = models.gpt2(n_inner=256)
    applied(model, inputs, Initialise("small"))
    for block in model.transformer.h:
        assert block.mlp.c_fc.weight.std().item() == pytest.approx(math.sqrt(2 / (5 * models.WIDTH)), rel=0.04)
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(
            2 / (models.LAYERS * math.sqrt(models.WIDTH)), rel=0.04
        )


@pytest.mark.parametrize(("blocks", "start"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_smaller_in_deeper_stacks(blocks: int, start: float) -> None:
    """Touvron et al. 2021, sec. 2."""
    model, inputs = models.decoder("pre", layers=blocks)
    ((_, found),) = make_plan(model, [ScaleResidual("layerscale", preserve=False)], inputs).steps
    assert {site.detail.value for site in found.sites} == {start}


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_second_norm_goes_into_the_first_with_its_offset(kind: str) -> None:
    """g = g₁ g₂ / s and b = (b₁ − mean b₁) g₂ / s + b₂, s² = mean g₁² + var b₁."""
    torch.manual_seed(0)
    made = nn.LayerNorm if kind == "layernorm" else nn.RMSNorm
    first, second = (made(models.WIDTH, eps=1e-6) for _ in range(2))
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.copy_(torch.randn(models.WIDTH) + 1)
    model, inputs = models.decoder("pre", norm=lambda: made(models.WIDTH, eps=1e-6), final=True)
    model._modules["final"] = nn.Sequential(first, second)
    before = [p.detach().double().clone() for p in (*first.parameters(), *second.parameters())]
    applied(model, inputs, RemoveNorms())
    if kind == "rmsnorm":
        gain, more = before
        assert torch.allclose(first.weight.double(), gain * more / gain.square().mean().sqrt(), rtol=1e-5)
        return
    gain, offset, more, shift = before
    spread = offset - offset.mean()
    size = (gain.square().mean() + spread.square().mean()).sqrt()
    assert torch.allclose(first.weight.double(), gain * more / size, rtol=1e-5)
    assert torch.allclose(first.bias.double(), spread * more / size + shift, rtol=1e-5, atol=1e-6)


def test_standardisation_starts_from_the_very_weight_also_where_eps_counts() -> None:
    torch.manual_seed(0)
    form, weight = StandardisedRows((1,), eps=0.5), torch.randn(4, 8) / 10
    weight = weight - weight.mean(1, keepdim=True)
    assert torch.allclose(form(*form.right_inverse(weight)), weight, rtol=1e-5, atol=1e-7)


def test_dynamic_tanh_starts_with_a_half() -> None:
    """Zhu et al. 2025, sec. 4."""
    model, inputs = models.llama()
    applied(model, inputs, ToDyT(start="unit"))
    assert {float(p.detach()) for name, p in model.named_parameters() if name.endswith("alpha")} == {0.5}


def test_who_reads_the_stream_as_it_is_and_gets_it_normed_is_named() -> None:
    class Forked(nn.Module):
        """Two modules read the last sum."""

        def __init__(self) -> None:
            super().__init__()
            built, _ = models.decoder("pre", final=False)
            self.embed, self.blocks = nn.Embedding(models.VOCABULARY, models.WIDTH), built.blocks
            self.left, self.right = (nn.Linear(models.WIDTH, models.VOCABULARY) for _ in range(2))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return {"logits": self.left(x) * self.right(x), "raw": x}

    model, inputs = Forked(), models.ids()
    ((_, found),) = make_plan(model, [AddFinalNorm()], inputs).steps
    (site,) = found.sites
    assert site.change.endswith("; raw will get it normed too")


def test_a_plan_says_that_folded_norms_train_otherwise() -> None:
    model, inputs = cnn()
    assert "note: in train mode the function changes" in str(make_plan(model, [FoldBatchNorm()], inputs))
