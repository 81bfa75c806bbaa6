"""Closed forms, against numbers worked out by hand, torch's own formats and small experiments."""

from __future__ import annotations

import math

import pytest
import torch

from normprobe import theory


@pytest.mark.parametrize("name", sorted(theory.FORMATS))
def test_formats_are_torchs(name: str) -> None:
    info, form = torch.finfo(getattr(torch, name)), theory.FORMATS[name]
    assert (form.largest, form.smallest_normal, form.epsilon) == (info.max, info.tiny, info.eps)
    subnormal = torch.tensor(form.smallest_subnormal, dtype=torch.float64).to(getattr(torch, name)).double()
    assert subnormal.item() == form.smallest_subnormal


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.50001, 1.0, 3.0])
def test_vanishing_is_what_a_cast_does(name: str, factor: float) -> None:
    form = theory.FORMATS[name]
    value = form.smallest_subnormal * factor
    cast = torch.tensor(value, dtype=torch.float64).to(getattr(torch, name))
    assert form.vanishes(value) is form.vanishes(-value) is (cast.item() == 0)
    assert form.vanishes(math.nan)


def test_spacing_is_the_distance_to_the_next_number() -> None:
    for value in (1.0, 50.0, 64.0, 65504.0 / 2, 2.0**-20):
        x = torch.tensor(value, dtype=torch.float16)
        above = torch.nextafter(x, torch.tensor(math.inf, dtype=torch.float16))
        assert theory.FLOAT16.spacing(value) == (above.double() - x.double()).item()
    assert theory.BFLOAT16.spacing(-64.0) == 0.5
    assert math.isnan(theory.BFLOAT16.spacing(math.inf))


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", " FP16", "half"])
def test_formats_are_found_by_their_names(dtype: str) -> None:
    assert theory.format_of(dtype) is theory.FLOAT16
    assert theory.format_of("int8") is None
    assert theory.format_of("") is None


def test_independent_writes_grow_with_the_root_of_their_number() -> None:
    assert theory.independent_growth([1.0] * 16) == 4.0
    assert theory.independent_growth([1.5] * 4, 4.0) == 5.0
    assert math.isnan(theory.independent_growth([1.0, math.nan], 4.0))
    stream = torch.randn(64, 4096).cumsum(0).square().mean(1).sqrt()
    assert stream[-1].item() == pytest.approx(theory.independent_growth([1.0] * 64), rel=0.05)


def test_gpt2_factor_keeps_the_sum_of_its_writes_at_one() -> None:
    assert theory.residual_init_factor(12) == pytest.approx(1 / math.sqrt(24))
    assert theory.independent_growth([theory.residual_init_factor(12)] * 24) == pytest.approx(1.0)
    assert theory.residual_init_factor(9, 1) == pytest.approx(1 / 3)


def test_deepnorm_constants_of_the_published_table() -> None:
    encoder = theory.deepnorm("encoder", encoder_layers=8)
    assert encoder == {"encoder": theory.DeepNormScale(2.0, pytest.approx(64**-0.25))}
    decoder = theory.deepnorm("decoder", decoder_layers=128)
    assert decoder == {"decoder": theory.DeepNormScale(4.0, pytest.approx(1024**-0.25))}
    both = theory.deepnorm("encoder-decoder", encoder_layers=16, decoder_layers=27)
    mixed = 16**0.25 * 27 ** (1 / 16)
    assert both["encoder"] == theory.DeepNormScale(pytest.approx(0.81 * mixed), pytest.approx(0.87 / mixed))
    assert both["decoder"] == theory.DeepNormScale(3.0, pytest.approx(324**-0.25))


def test_skip_decay_is_what_a_stack_of_norms_does_to_a_gradient() -> None:
    x = torch.randn(16, 2048, dtype=torch.float64, requires_grad=True)
    h = x / x.square().mean(-1, keepdim=True).sqrt().detach()
    start = h
    for _ in range(6):  # three layers of two norms each, branches that depend on nothing
        h = torch.nn.functional.layer_norm(h + 0.5 * torch.randn_like(h), (2048,))
    (gradient,) = torch.autograd.grad(h, start, torch.randn_like(h))
    rms = gradient.square().mean().sqrt().item()
    assert rms == pytest.approx(theory.post_norm_skip_decay(1, 4, branch_rms=0.5), rel=0.02)
    assert theory.post_norm_skip_decay(4, 4) == 1.0
    assert theory.post_norm_skip_decay(11, 12) == 0.5


def test_initial_standard_deviations_are_torchs() -> None:
    weight = torch.empty(600, 400)
    assert torch.nn.init.xavier_normal_(weight, gain=2.0).std().item() == pytest.approx(
        theory.xavier_std(400, 600, 2.0), rel=0.01
    )
    for slope in (0.0, 0.5):
        torch.nn.init.kaiming_normal_(weight, a=slope)
        assert weight.std().item() == pytest.approx(theory.kaiming_std(400, slope), rel=0.01)
    assert theory.lecun_std(100) == 0.1
    assert theory.kaiming_std(50) == pytest.approx(0.2)


def test_sizes_that_make_no_sense_are_named() -> None:
    for call, name in (
        (lambda: theory.residual_init_factor(0), "layers"),
        (lambda: theory.deepnorm("encoder", decoder_layers=6), "encoder_layers"),
        (lambda: theory.deepnorm("encoder-decoder", encoder_layers=6), "decoder_layers"),
        (lambda: theory.lecun_std(0), "fan_in"),
        (lambda: theory.xavier_std(1, 0), "fan_out"),
        (lambda: theory.kaiming_std(0), "fan_in"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be at least"):
            call()
    with pytest.raises(ValueError, match="between 1 and 4, found 5"):
        theory.post_norm_skip_decay(5, 4)


def test_slope_of_gradients() -> None:
    assert theory.gradient_slope(post_norm=False, branch_rms=3.0) == 0
    assert theory.gradient_slope(post_norm=True) == pytest.approx(math.log(2) / 2)
    assert theory.gradient_slope(post_norm=True, branch_rms=0.5) == pytest.approx(math.log(1.25) / 2)
