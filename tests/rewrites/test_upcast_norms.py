"""Norms in half precision against float64, and what must survive around them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normprobe
from normprobe.errors import RewriteError
from normprobe.norms.identify import identify_module
from normprobe.rewrites import UpcastNorms, make_plan
from normprobe.rewrites.norms.upcast import Upcast
from normprobe.rewrites.swap import lay
from tests.models import WIDTH, decoder, llama, shuffled
from tests.norms import zoo
from tests.rewrites.cases import HeadNorm, Inline, Normalized, Returning, Stubborn, narrow, narrow_decoder

NORMS: dict[str, Callable[[], nn.Module]] = {
    "weight": narrow,
    "weight and bias": lambda: zoo.HalfLayerNorm(1e-6),
    "one plus weight": lambda: zoo.RMSNorm(upcast=False, one_plus=True),
    "per head": HeadNorm,
    "casts to its weight": Returning,
}
HALF = [torch.bfloat16, torch.float16]


def upcast(norm: nn.Module) -> nn.Module:
    lay(norm, Upcast, "norm")
    return norm


def reference(norm: nn.Module, x: Tensor) -> Tensor:
    """The same norm on the same (rounded) values in float64."""
    return copy.deepcopy(norm).double()(x.double())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NORMS)
def test_the_error_against_float64_shrinks_to_the_last_rounding(name: str, dtype: torch.dtype) -> None:
    norm = shuffled(NORMS[name]()).to(dtype)
    x = (3 * torch.randn(64, WIDTH)).to(dtype)
    wanted = reference(norm, x)
    before = (norm(x).double() - wanted).abs()
    y = upcast(norm)(x)
    after = (y.double() - wanted).abs()
    assert y.dtype == dtype
    assert after.mean() < 0.7 * before.mean()
    assert bool((after <= 1.01 * torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-6).all())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_stay_equal_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    norm = shuffled(NORMS[name]()).to(dtype)
    x = torch.randn(8, WIDTH, dtype=dtype)
    before = norm(x)
    assert torch.equal(upcast(norm)(x), before)


def test_float16_no_longer_overflows_at_300() -> None:
    norm = narrow().half()
    x = torch.full((2, WIDTH), 300.0, dtype=torch.float16)
    assert norm(x).abs().max() == 0  # 1/√∞
    torch.testing.assert_close(upcast(norm)(x), torch.ones_like(x))


@pytest.mark.parametrize("name", NORMS)
def test_it_is_identified_as_the_same_norm_in_float32(name: str) -> None:
    norm = NORMS[name]()
    before = identify_module(norm, zoo.call_of(zoo.ROWS))
    after = identify_module(upcast(norm), zoo.call_of(zoo.ROWS))
    assert before is not None
    assert after is not None
    assert (before.reduction, after.reduction) == ("input", "float32")
    assert (before.kind, before.affine, before.eps, before.size) == (after.kind, after.affine, after.eps, after.size)


def test_a_model_is_upcast_and_reads_so_again() -> None:
    model, inputs = narrow_decoder()
    keys, norms = list(model.state_dict()), [m for m in model.modules() if isinstance(m, zoo.RMSNorm)]
    plan = make_plan(model, [UpcastNorms(expect=5)], inputs).apply()
    assert list(model.state_dict()) == keys
    assert [m for m in model.modules() if isinstance(m, zoo.RMSNorm)] == norms
    assert {norm.reduction for norm in normprobe.probe(model, inputs, level="structure").anatomy.norms} == {"float32"}
    assert plan.proof is not None
    assert (plan.proof.max_abs, plan.proof.holds, plan.proof.agreement) == (0.0, True, 1.0)


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_model_comes_closer_to_its_float32_copy(dtype: torch.dtype) -> None:
    model, inputs = narrow_decoder()
    proof = make_plan(model.to(dtype), [UpcastNorms()], inputs).apply().proof
    assert proof is not None
    assert proof.holds
    assert proof.rounding_after is not None
    assert proof.rounding_before is not None
    assert proof.max_abs > 0
    assert proof.rounding_after < proof.rounding_before


def test_copies_pickles_and_casts_keep_it() -> None:
    norm = upcast(shuffled(narrow()))
    x = 300 * torch.ones(2, WIDTH, dtype=torch.float16)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(twin) is type(norm)
        assert twin.weight is not norm.weight
        assert twin.half()(x).abs().max() > 0
    assert "float32 (normprobe)" in repr(norm)
    fresh = shuffled(narrow(), seed=3)
    fresh.load_state_dict(norm.state_dict(), strict=True)
    assert torch.equal(fresh.weight, norm.weight)


def test_gradients_and_checkpointing() -> None:
    norm = upcast(shuffled(narrow())).bfloat16()
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    plain = torch.autograd.grad(norm(x).float().square().sum(), [x, norm.weight])
    again = torch.autograd.grad(checkpoint(norm, x, use_reentrant=False).float().square().sum(), [x, norm.weight])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    wide = copy.deepcopy(norm).double()
    exact = torch.autograd.grad(wide(x.double()).square().sum(), [wide.weight])[0]
    torch.testing.assert_close(plain[1].double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore")
def test_compiled_in_one_graph() -> None:
    norm = upcast(shuffled(narrow())).bfloat16()
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), norm(x))


def refusals(model: nn.Module, inputs: object) -> list[str]:
    plan = make_plan(model, [UpcastNorms()], inputs)
    assert not plan.steps[0][1].sites
    return [each.why for each in plan.steps[0][1].refused]


class Wrapped(nn.Module):
    """Its gain lies in a module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = zoo.Rule(lambda self, x: x * self.w, w=torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_what_cannot_be_upcast_is_refused_with_the_reason() -> None:
    assert "no module to change" in refusals(Inline().bfloat16(), torch.randn(2, 4, WIDTH).bfloat16())[0]
    assert "modules inside it (gain)" in refusals(*decoder("pre", norm=Wrapped, layers=1))[0]
    assert "its forward casts by itself" in refusals(*decoder("pre", norm=Stubborn, layers=1))[0]
    model, inputs = decoder("pre", norm=narrow, layers=1, final=False)
    for module in model.modules():
        if isinstance(module, zoo.RMSNorm):
            module.forward = module.forward
    assert "replaced on the instance" in refusals(model, inputs)[0]


def test_a_clamp_in_half_precision_behind_a_fused_reduction_is_a_site() -> None:
    model, inputs = decoder("pre", norm=Normalized, layers=1)
    make_plan(model, [UpcastNorms(expect=3)], inputs).apply()
    assert torch.isfinite(model.final.half()(torch.zeros(1, WIDTH, dtype=torch.float16))).all()


def test_a_wrong_gain_is_caught_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per cent, planted into the layer itself."""
    below = Upcast.normprobe_below
    monkeypatch.setattr(Upcast, "normprobe_below", lambda self, x: 1.01 * below(self, x))
    monkeypatch.setattr("normprobe.rewrites.norms.upcast._HALF", (torch.float16, torch.bfloat16, torch.float64))
    assert "would be" in refusals(*narrow_decoder())[0]


def test_nothing_to_do_is_said_loudly() -> None:
    model, inputs = llama()
    with pytest.raises(RewriteError, match="UpcastNorms would change nothing"):
        make_plan(model, [UpcastNorms()], inputs).apply()
    with pytest.raises(RewriteError, match=r"expected: 7 sites\n  found: 0 sites"):
        make_plan(model, [UpcastNorms(expect=7)], inputs).apply()
    assert make_plan(model, [UpcastNorms(expect=0)], inputs).apply().state == "applied"
