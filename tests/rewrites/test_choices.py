"""A rewritten model is given the choices of the original where rounding alone made it take others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import MixtralConfig, MixtralForCausalLM

import normprobe
from normprobe.errors import RewriteError
from normprobe.records import Anatomy
from normprobe.rewrites import FoldGains, Initialise, Rewrite, make_plan
from normprobe.rewrites.base import Effect
from normprobe.rewrites.choices import Noted
from normprobe.rewrites.proof import Baseline, Proof
from tests.rewrites.cases import Scaled

TIE = 1 + 2**-22  # by how much the first of two experts is ahead
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(1).indices,
    "topk along the first": lambda scores: scores.T.topk(1, 0).indices.T,
    "sort": lambda scores: scores.sort(descending=True).indices[:, :1],
    "stable sort": lambda scores: scores.sort(stable=True, dim=1, descending=True).indices[:, :1],
    "argsort": lambda scores: scores.argsort(dim=-1, descending=True)[:, :1],
    "max": lambda scores: scores.max(1).indices[:, None],
    "max, dimension kept": lambda scores: scores.max(-1, keepdim=True).indices,
    "min": lambda scores: (-scores).min(-1, keepdim=True).indices,
    "argmax": lambda scores: scores.argmax(-1)[:, None],
    "argmin": lambda scores: (-scores).argmin(dim=1, keepdim=True),
}


class Routed(nn.Module):
    """Gives each row what one of two experts holds, which differ by far: scores (N, 2), experts (2, D)."""

    def __init__(self, taken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(1, 2, bias=False)
        self.experts = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 5.0]]))
        self.taken = taken
        with torch.no_grad():
            self.router.weight.copy_(torch.tensor([[TIE], [1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.taken(self.router(x))[:, 0]] * x


def proven(taken: Callable[[Tensor], Tensor], first: float, effect: Effect = Effect.EXACT) -> Proof:
    """What is told once the first expert's score has changed by a factor."""
    model, x = Routed(taken), torch.tensor([[1.0], [3.0], [-2.0]])  # the third row takes the second
    baseline = Baseline.of(model, x, effect, Anatomy())
    with torch.no_grad():
        model.router.weight[0] *= first
    return baseline.compare(model, x)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_a_choice_that_rounding_made_another_is_given(taken: Callable[[Tensor], Tensor]) -> None:
    proof = proven(taken, 1 - 2**-21)
    assert (proof.max_abs, proof.holds) == (0.0, True)
    assert (proof.choices, proof.choices_given) == (3, 3)
    assert "given the original's choice where rounding made another in 3 of 3 rows (top-k, sort, max)" in str(proof)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_another_choice_is_not_given(taken: Callable[[Tensor], Tensor]) -> None:
    proof = proven(taken, 0.99)
    assert proof.holds is False
    assert (proof.choices, proof.choices_given) == (3, 0)
    assert "given" not in str(proof)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_what_is_near_but_by_more_than_rounding_is_not_given(taken: Callable[[Tensor], Tensor]) -> None:
    """As all distances to a table of small vectors are."""
    proof = proven(taken, 1 - 2**-12)
    assert (proof.holds, proof.choices_given) == (False, 0)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_the_same_choice_gives_the_same_bits(taken: Callable[[Tensor], Tensor]) -> None:
    proof = proven(taken, 1.0)
    assert (proof.max_abs, proof.choices, proof.choices_given) == (0.0, 3, 0)


@pytest.mark.parametrize(("rows", "holds"), [(3, None), (7, None), (12, True)])
def test_unmeasured_rounding_explains_few_choices(rows: int, holds: bool | None) -> None:
    model, x = Routed(TAKEN["topk"]), torch.ones(rows, 1)
    x[3:] = -1.0  # whose scores are far apart
    model.router.register_forward_hook(lambda module, args, scores: scores + (args[0] < 0) * torch.tensor([0.0, 1.0]))
    baseline = Baseline.of(model, x, Effect.EXACT, Anatomy(), room=0)
    with torch.no_grad():
        model.router.weight[0] *= 1 - 2**-19
    proof = baseline.compare(model, x)
    assert (proof.max_abs, proof.choices, proof.choices_given) == (0.0, rows, 3)
    assert proof.holds is holds
    told = f"it chose otherwise in 3 of {rows} rows, too many to take for rounding unmeasured; a wider copy takes"
    assert (told in proof.tolerance_source) == (holds is None)


def test_what_a_rewrite_changes_on_purpose_is_told_as_it_is() -> None:
    proof = proven(TAKEN["topk"], 1 - 2**-21, Effect.BREAKING)
    assert proof.max_abs > 1
    assert (proof.choices, proof.choices_given) == (0, 0)


@pytest.mark.parametrize(
    "other",
    [lambda s: s.topk(2).indices, lambda s: s.max(1, keepdim=True).indices],
    ids=["more", "otherwise"],
)
def test_a_model_that_chooses_otherwise_is_given_nothing(other: Callable[[Tensor], Tensor]) -> None:
    scores = torch.tensor([[TIE, 1.0]])
    with Noted() as noted:
        for _ in range(3):
            scores.topk(1)
    given = noted.choices.given(1e-3)
    with given:
        assert other(scores.flip(1))[0, 0] == 1
        assert scores.flip(1).topk(1).indices.tolist() == [[1]], "nor afterwards"
    assert given.rows == 0


def test_values_follow_what_is_chosen_and_rows_are_told_apart() -> None:
    before = torch.tensor([[TIE, 1.0, -9.0], [2.0, 1.0, float("-inf")], [1.0, 0.5, float("nan")]])
    after = torch.tensor([[1.0, TIE, -9.0], [1.0, 2.0, float("-inf")], [1.0, 0.5, float("nan")]])
    with Noted() as noted:
        before.topk(2)
    given = noted.choices.given(1e-3)
    with given:
        values, indices = after.topk(2)
    assert indices[:2].tolist() == [[0, 1], [1, 0]]
    assert values[:2].tolist() == [[1.0, TIE], [2.0, 1.0]]
    assert (given.rows, given.kept) == (3, 1)


@pytest.mark.parametrize("masked", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_what_is_masked_does_not_make_others_nearly_equal(masked: float) -> None:
    def scores(first: float) -> Tensor:
        return torch.tensor([[first, 1.0, 0.5, masked, masked]])

    for take in (lambda s: s.topk(1), lambda s: s.topk(4), lambda s: s.sort(stable=True, descending=True)):
        with Noted() as noted:
            take(scores(TIE))
        for first, kept in ((1 - 2**-22, 1), (0.9, 0), (masked, 0)):
            given = noted.choices.given(1e-3)
            with given:
                take(scores(first))
            assert (given.rows, given.kept) == (1, kept), first


def test_what_the_model_does_with_its_choice_changes_none_that_is_given() -> None:
    """As routers make places in a flat table of them."""
    scores = torch.tensor([[TIE, 1.0]])
    with Noted() as noted:
        scores.topk(1).indices.add_(8)
    with noted.choices.given(1e-3):
        assert scores.flip(1).topk(1).indices.tolist() == [[0]]


def test_nothing_is_chosen_of_nothing() -> None:
    """As an expert does that no token goes to."""
    empty, noted = torch.empty(0), Noted()
    for mode in (lambda: noted, lambda: noted.choices.given(1e-3)):
        with mode():
            assert empty.sort().indices.shape == (0,)
            assert torch.ones(2, 3).topk(0).indices.shape == (2, 0)


def test_whole_numbers_are_chosen_without_rounding() -> None:
    with Noted() as noted:
        torch.tensor([[1, 2]]).argmax(-1)
        torch.tensor(1.0).topk(1)
        torch.tensor([1.0, 2.0]).argmax()
    assert noted.choices.taken == []


class Flex(nn.Module):
    """Attention by an operator that takes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(flex_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rewrite", [FoldGains(), Initialise("xavier")])
def test_a_forward_with_operators_of_higher_order_is_proven(rewrite: Rewrite) -> None:
    model, x = Flex().eval(), torch.randn(2, 7, 32)
    proof = normprobe.rewrite(model, [rewrite], x).proof
    assert proof is not None
    assert proof.holds is (True if rewrite.effect is Effect.EXACT else None)
    assert "no wider copy runs" not in proof.tolerance_source


def mixtral(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return model


def test_a_fold_of_a_mixture_of_experts_is_proven() -> None:
    model = mixtral(1)
    ids = {"input_ids": torch.randint(0, 256, (1, 32))}
    proof = make_plan(model, [FoldGains()], ids).apply().proof
    assert proof is not None
    assert proof.holds
    assert 0 < proof.choices_given < proof.choices == 128


def test_a_wrong_router_of_a_mixture_of_experts_is_refused() -> None:
    model = mixtral(1)
    ids = {"input_ids": torch.randint(0, 256, (1, 32))}
    with pytest.raises(RewriteError, match="could not prove Scaled"):
        make_plan(model, [Scaled(-1.0, ("model.layers.2.mlp.gate",))], ids).apply()
