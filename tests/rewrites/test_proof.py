"""Both sides of a proof see the same inputs and the same weights, whatever the forward writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy
from normprobe.rewrites import FoldGains, make_plan
from normprobe.rewrites.agreement import next_tokens
from normprobe.rewrites.base import Effect
from normprobe.rewrites.distance import distance, largest
from normprobe.rewrites.edits import PART
from normprobe.rewrites.proof import Baseline, Proof
from tests.models import gpt2
from tests.rewrites.cases import Scaled
from tests.trace import Snapshot


@dataclass
class Output:
    x: Any


class Writes(nn.Module):
    """Adds one to its input and a cache to its list, renormalises its table, doubles its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(3, 4, max_norm=0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Output:
        x += 1
        seen.append(x)
        self.linear.bias.data *= 2
        return Output({"y": self.linear(x * len(seen) + self.table(torch.arange(3)))})


def test_no_change_is_proven_to_be_none() -> None:
    torch.manual_seed(0)
    model, inputs = Writes(), (torch.randn(3, 4), [torch.ones(1)])
    before = Snapshot(model, inputs)
    baseline = Baseline.of(model, inputs, Effect.EXACT, Anatomy())
    proof = baseline.compare(model, inputs)
    assert (proof.max_abs, proof.holds) == (0.0, True)
    assert proof.rounding_before is not None
    assert proof.rounding_before < 1e-5, "the wider copy saw the same inputs"
    before.assert_kept()


class Narrowed(nn.Module):
    """Gives float32 whatever it computes in, as a Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).float()


def test_a_wider_copy_is_told_by_its_own_dtype() -> None:
    torch.manual_seed(0)
    model, inputs = Narrowed(), torch.randn(512, 64)
    proof = Baseline.of(model, inputs, Effect.EXACT, Anatomy()).compare(model, inputs)
    assert "distance to a float64 copy of it on these inputs, whose outputs are float32" in proof.tolerance_source


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_change_is_not_hidden(factor: float) -> None:
    torch.manual_seed(0)
    model, inputs = Writes(), (torch.randn(3, 4), [])
    baseline = Baseline.of(model, inputs, Effect.EXACT, Anatomy())
    with torch.no_grad():
        model.linear.weight *= factor
    assert baseline.compare(model, inputs).holds is False


def test_nothing_to_prove() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(None)

    with pytest.raises(RewriteError, match="nothing to prove: Empty returns no floating tensor"):
        Baseline.of(Empty(), torch.ones(1), Effect.EXACT, Anatomy())


def test_an_exact_rewrite_has_a_tolerance_also_where_no_wider_copy_runs() -> None:
    class Narrow(nn.Module):
        """Takes float32 alone."""

        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype is torch.float32
            found: Tensor = self.read(x)
            return found

    model, x = Narrow(), torch.randn(3, 4)
    with pytest.raises(RewriteError, match=r"(?s)not prove Scaled.*choice: 0.001 of the largest output"):
        make_plan(model, [Scaled(1.01, ("read",))], x).apply()
    plan = make_plan(model, [Scaled(1.0, ("read",))], x).apply()
    assert plan.proof is not None
    assert plan.proof.holds
    assert "no wider copy runs" in plan.proof.tolerance_source


class Even(nn.Module):
    """Numbers that float32 holds exactly, so that a wider copy gives the very same outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.read.weight.copy_(torch.arange(12).reshape(3, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.read(x)
        return found


@pytest.mark.parametrize(("spacings", "holds"), [(1, True), (3, True), (6, False), (16, False)])
def test_a_few_spacings_of_the_largest_output_are_rounding_and_more_are_not(spacings: int, holds: bool) -> None:
    model, x = Even(), torch.ones(2, 4)
    baseline = Baseline.of(model, x, Effect.EXACT, Anatomy())
    with torch.no_grad():
        model.read.weight *= 1 + spacings * 2**-23
    proof = baseline.compare(model, x)
    assert proof.rounding_before == 0.0
    assert proof.tolerance == pytest.approx(4 * 2**-23 * 38 / 8)
    assert proof.holds is holds
    assert "4 spacings of the largest output" in proof.tolerance_source


def test_what_was_measured_counts_where_it_is_more() -> None:
    class Cancelling(Even):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) / 3 + 1000) - 1000

    model, x = Cancelling(), torch.ones(2, 4)
    baseline = Baseline.of(model, x, Effect.EXACT, Anatomy())
    with torch.no_grad():
        model.read.weight *= 1 + 2**-12
    proof = baseline.compare(model, x)
    assert proof.rounding_before is not None
    assert 1e-6 < proof.tolerance == 2 * proof.rounding_before
    assert proof.tolerance_source.startswith("twice the original's own distance")
    assert proof.holds is False


def hooked(factor: float) -> tuple[nn.Module, Any]:
    """A GPT-2 whose MLPs write `factor` times what they compute, by a hook."""
    model, inputs = gpt2()
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda module, args, output: factor * output)
    return model, inputs


def test_the_wider_copy_calls_the_hooks_too() -> None:
    model, inputs = hooked(2.0)
    proof = make_plan(model, [FoldGains()], inputs).apply().proof
    assert proof is not None
    assert proof.rounding_before is not None
    assert proof.rounding_before < 1e-5
    model, inputs = hooked(2.0)
    with pytest.raises(RewriteError, match=r"(?s)not prove Scaled.*twice the original's own distance"):
        make_plan(model, [Scaled(1.001, ("transformer.ln_f",))], inputs).apply()


def test_a_hook_that_writes_to_the_model_leaves_it_as_it_was() -> None:
    model, inputs = gpt2()
    norm, counts = model.transformer.ln_f, model.transformer.h[0].mlp.c_fc.bias

    def count(module: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            counts.add_(1.0)

    norm.register_forward_hook(count)
    before = Snapshot(model, inputs)
    Baseline.of(model, inputs, Effect.EXACT, Anatomy())
    before.assert_kept()


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-1)])
def test_a_copy_that_computes_something_else_makes_no_tolerance(dtype: torch.dtype, share: float) -> None:
    class Otherwise(nn.Linear):
        """Another function in a wider dtype."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.dtype is dtype else -super().forward(x)

    torch.manual_seed(0)
    model, x = Otherwise(4, 4).to(dtype), torch.randn(3, 4, dtype=dtype)
    baseline = Baseline.of(model, x, Effect.EXACT, Anatomy())
    largest = float(model(x).detach().abs().max())
    with torch.no_grad():
        model.weight *= 1 + 2 * share
        model.bias *= 1 + 2 * share
    proof = baseline.compare(model, x)
    assert proof.holds is False
    assert proof.tolerance == pytest.approx(share * largest, rel=1e-2)
    assert f"choice: {share:g} of the largest output" in proof.tolerance_source
    assert "less than twice the original's own distance" in proof.tolerance_source


def test_the_comparison_of_many_logits_is_that_of_all_at_once() -> None:
    """They are compared a few rows at a time, which leaves no number out and moves none."""
    torch.manual_seed(2)
    before = torch.randn(2, 300, PART // 64)
    after = before + 0.1 * torch.randn_like(before)
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    assert next_tokens(before, after, ((2, 300),)) == {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "agreement": float((before.argmax(-1) == after.argmax(-1)).double().mean()),
        "tokens": 600,
    }


@pytest.mark.parametrize("place", [0, PART - 1, PART, 3 * PART + 4])
def test_the_largest_change_is_found_wherever_it_is(place: int) -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            out.view(-1)[place] += self.by
            return out

    model, inputs = Moved(), torch.zeros(1, 3 * PART + 5)
    baseline = Baseline.of(model, inputs, Effect.BREAKING, Anatomy())
    with torch.no_grad():
        model.by.fill_(0.75)
    assert baseline.compare(model, inputs).max_abs == 0.75
    with torch.no_grad():
        model.by.fill_(float("nan"))
    assert baseline.compare(model, inputs).max_abs == float("inf")


class Cut(nn.Module):
    """Logits of 2 rows of 4 tokens, of which those of the last tokens are NaN, as of rows that see nothing."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.table, self.broken = nn.Embedding(8, 8), broken

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids)
        gone = torch.arange(ids.shape[1]) >= ids.shape[1] - self.broken
        return found.masked_fill(gone[:, None], torch.nan)


def cut(before: int, after: int, effect: Effect, factor: float = 1.0) -> Proof:
    torch.manual_seed(0)
    model, ids = Cut(before), torch.arange(8).reshape(2, 4)
    baseline = Baseline.of(model, ids, effect, Anatomy())
    model.broken = after
    with torch.no_grad():
        model.table.weight *= factor
    return baseline.compare(model, ids)


def test_what_is_not_finite_on_both_sides_is_no_change_and_has_no_verdict() -> None:
    proof = cut(1, 1, Effect.EXACT)
    assert (proof.max_abs, proof.max_rel, proof.kl, proof.agreement, proof.tokens) == (0.0, 0.0, 0.0, 1.0, 6)
    assert (proof.rounding_before, proof.tolerance, proof.holds) == (0.0, None, None)
    told = "NaN or infinite in 16 of 64 values (in the original 16); no verdict: the original's outputs are not finite"
    assert told in str(proof)
    assert 0 < cut(1, 1, Effect.EXACT, 1.5).max_rel < 1
    nothing = cut(4, 4, Effect.EXACT)
    assert (nothing.kl, nothing.agreement, nothing.tokens) == (None, None, 0)
    assert not {"KL", "loss", "inf,"} & set(str(nothing).split())


@pytest.mark.parametrize("before", [0, 1])
def test_an_exact_rewrite_that_makes_finite_outputs_nan_does_not_hold(before: int) -> None:
    proof = cut(before, 2, Effect.EXACT)
    assert (proof.holds, proof.max_abs, proof.tokens) == (False, float("inf"), 4)
    made = 16 * (2 - before)
    assert f"refused: {made} values are NaN or infinite that are finite in the original" in str(proof)
    with pytest.raises(RewriteError, match=rf"could not prove Cut(.|\n)*found: {made} values are NaN"):
        raise proof.refusal("Cut")
    changed = cut(before, 2, Effect.BREAKING)
    assert changed.holds is None
    assert f"in 32 of 64 values (in the original {16 * before})" in str(changed)


def test_infinities_are_alike_by_their_sign_alone() -> None:
    up, down, nan = ([torch.tensor([1.0, value])] for value in (torch.inf, -torch.inf, torch.nan))
    assert [distance(up, up), distance(down, down), distance(nan, nan)] == [0.0] * 3
    assert [distance(up, down), distance(up, nan), distance(nan, [torch.ones(2)])] == [float("inf")] * 3
    assert (largest(up), largest(nan)) == (1.0, 1.0)
