"""LayerNorm to RMSNorm: the same function, a stream without mean, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.rewrites import Effect, Plan, SetEps, ToRMSNorm, make_plan
from tests.models import bert, decoder
from tests.rewrites.cases import snapshot

transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).reshape(2, 16) * 3
SIZE = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_embd": 32, "n_head": 4},
    "OPT": {**LAYERS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": {**LAYERS, "intermediate_size": 48, "use_parallel_residual": False},
    "Bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4},
    "GPTJ": {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 8},  # its branches are parallel
}
WAYS = [(True, "entry"), (True, "untie"), (False, "entry")]  # whether the head is tied, and the setting `tied`


def built(kind: str, tied: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with random gains and biases, and weights whose columns have a mean."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZE, **KINDS[kind], tie_word_embeddings=tied)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter) + (0.3 if parameter.dim() == 1 else 0.02))
    return model.to(dtype)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS)["logits"]
    return out.double()


def applied(model: nn.Module, **settings: Any) -> Plan:
    return make_plan(model, [ToRMSNorm(**settings)], {"input_ids": IDS}).apply()


@pytest.mark.parametrize(("tied", "how"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exact(kind: str, tied: bool, how: str) -> None:
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-4))[: 2 if kind == "GPT2" else 1]:
        model = built(kind, tied, dtype)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
        before, kept = logits(model), snapshot(model)
        plan = applied(model, tied=how)
        assert float((logits(model) - before).abs().max() / before.abs().max()) <= most
        anatomy = normprobe.probe(model, {"input_ids": IDS}, level="structure").anatomy
        read = {branch.pre_norm for branch in anatomy.streams[0].branches} | {anatomy.streams[0].final_norm}
        assert {norm.kind for norm in anatomy.norms if norm.path in read} == {"rmsnorm"}
        plan.undo()
        assert snapshot(model) == kept
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("kind", "tied", "how"), [*(("GPT2", *way) for way in WAYS), *((k, *WAYS[0]) for k in KINDS)][1:]
)
def test_in_bfloat16_it_rounds_no_worse_than_the_model_itself(kind: str, tied: bool, how: str) -> None:
    proof = applied(built(kind, tied, torch.bfloat16), tied=how).proof
    assert proof is not None
    assert proof.holds
    assert proof.rounding_before is not None
    assert proof.rounding_after is not None
    assert 0 < proof.rounding_after <= proof.rounding_before


@pytest.mark.parametrize(("tied", "how"), WAYS)
def test_the_stream_has_no_mean_anywhere(tied: bool, how: str) -> None:
    model = built("GPT2", tied)
    seen: list[Tensor] = []
    for block in model.transformer.h:
        block.ln_1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        block.ln_2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(model)
    assert all(float(x.mean(-1).abs().max()) > 1e-3 for x in seen)
    seen.clear()
    applied(model, tied=how)
    seen.clear()
    logits(model)
    assert len(seen) == 4
    assert all(float(x.mean(-1).abs().max()) < 1e-12 for x in seen)


def test_a_tied_table_stays_or_is_untied_as_asked() -> None:
    model = built("GPT2")
    table = model.transformer.wte.weight.detach().clone()
    applied(model)
    assert torch.equal(model.transformer.wte.weight, table)
    model = built("GPT2")
    plan = make_plan(model, [ToRMSNorm(tied="untie")], {"input_ids": IDS})
    assert "adds lm_head.weight" in str(plan)
    assert "config.tie_word_embeddings becomes false" in str(plan)
    before, old = logits(model), model.lm_head.weight
    plan.apply()
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, table)
    assert model.config.tie_word_embeddings is False
    assert float((logits(model) - before).abs().max()) < 1e-12
    plan.undo()
    assert model.lm_head.weight is old is model.transformer.wte.weight
    assert model.config.tie_word_embeddings is True


def test_where_the_tables_hold_no_mean_the_stock_class_computes_the_same(tmp_path: Any) -> None:
    """The weights alone carry the change: LayerNorm of a stream without mean is the RMSNorm."""
    model = built("GPT2", tied=False)
    before = logits(model)
    applied(model)
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert float((logits(stock) - before).abs().max()) < 1e-10


def test_copies_pickles_and_other_dtypes_carry_it_along() -> None:
    model = built("GPTNeoX")
    applied(model)
    wanted = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), wanted)
    assert logits(model.float()).dtype is torch.float64
    assert list(model.state_dict()) == list(built("GPTNeoX").state_dict())


def test_gradients_reach_gains_offsets_and_writers() -> None:
    model = built("GPT2")
    applied(model)
    model(input_ids=IDS, labels=IDS)["loss"].backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "c_attn.bias" not in n)


def test_dropout_is_told() -> None:
    assert "the model has dropout" in str(make_plan(built("GPT2"), [ToRMSNorm()], {"input_ids": IDS}))
    assert "the model has dropout" not in str(make_plan(built("GPTNeoX"), [ToRMSNorm()], {"input_ids": IDS}))


def test_the_plain_swap_is_breaking_and_moves_the_outputs() -> None:
    model = built("GPT2")
    before = logits(model)
    plan = applied(model, exact=False)
    assert plan.effect is Effect.BREAKING
    assert float((logits(model) - before).abs().max()) > 1e-3
    assert all(site.forward and not site.touched for site in plan.steps[0][1].sites)


class Scaled(nn.Module):
    """x + γ·f(norm(x)) with a γ for each channel, or with a norm behind f."""

    def __init__(self, behind: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.f, self.behind = nn.LayerNorm(16), nn.Linear(16, 16), behind
        self.gamma = nn.Parameter(torch.rand(16)) if behind is None else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.norm(x)).relu() @ torch.eye(16) if self.behind is None else self.behind(self.f(self.norm(x)))
        return x + (y if self.gamma is None else self.gamma * self.f(self.norm(x)))


def refusal(model: nn.Module, inputs: Any) -> str:
    (found,) = make_plan(model, [ToRMSNorm()], inputs).steps[0][1].refused
    with pytest.raises(RewriteError, match="would change nothing"):
        make_plan(model, [ToRMSNorm()], inputs).apply()
    return found.why


def test_streams_that_it_does_not_suit_are_refused_with_the_reason() -> None:
    x = torch.randn(2, 5, 16)
    tail = (nn.LayerNorm(16), nn.Linear(16, 8))
    assert "scale for each channel" in refusal(nn.Sequential(*(Scaled(None) for _ in range(3)), *tail), x)
    behind = nn.Sequential(*(Scaled(nn.LayerNorm(16)) for _ in range(3)), *tail)
    assert "ends in the norm 0.behind" in refusal(behind, x)
    assert "normed itself" in refusal(*decoder("post"))
    assert "without a norm" in refusal(*decoder("pre", final=False))


def test_a_writer_that_is_left_out_is_caught_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("GPT2")
    kept = snapshot(model)
    monkeypatch.setattr("normprobe.rewrites.norms.to_rmsnorm.rewrite._writers", lambda survey, stream: iter(()))
    with pytest.raises(RewriteError, match="could not prove ToRMSNorm; the model is as it was"):
        applied(model)
    assert snapshot(model) == kept


class Reader(nn.Module):
    """One pre-norm write and a final norm whose eps is as large as the signal."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16, eps=0.5) for _ in range(3))
        self.writes = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, write in zip(self.norms, self.writes, strict=False):
            x = x + write(norm(x))
        out: Tensor = self.head(self.norms[-1](x))
        return out


def test_eps_stays_in_force_and_halves_are_squared_in_float32() -> None:
    torch.manual_seed(0)
    body, x = nn.Sequential(nn.Identity(), Reader()).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    before = body(x)
    make_plan(body, [ToRMSNorm()], x).apply()
    torch.testing.assert_close(body(x), before, rtol=1e-12, atol=1e-12)
    norm = body[1].norms[0].half()
    rows = (600 * (x - x.mean(-1, keepdim=True))).half()
    wanted = rows.double() / (rows.double().square().mean(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(norm(rows).double(), wanted, rtol=2e-3, atol=2e-3)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.reads = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, read in zip(self.norms, self.reads, strict=False):
            x = x + read(norm(x))
        found: Tensor = self.norms[2](x)
        return found


class Sinusoids(nn.Module):
    """Adds positions to the embeddings that are kept as a buffer, and have a mean over the features."""

    def __init__(self, number: bool) -> None:
        super().__init__()
        self.table, self.body, self.number = nn.Embedding(64, 32), Body(), number
        self.register_buffer("places", torch.sin(torch.arange(16.0)[:, None] * torch.arange(32.0)) + 0.5)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = 0.5 if self.number else self.places[: ids.shape[1]]
        found: Tensor = self.head(self.body(self.table(ids) + places))
        return found


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("tied", ["entry", "untie"])
def test_positions_kept_as_a_buffer_have_a_mean_too(tied: Any, number: bool) -> None:
    torch.manual_seed(0)
    model, ids = Sinusoids(number).double().eval(), torch.arange(12)[None]
    before = model(ids).detach()
    make_plan(model, [ToRMSNorm(tied=tied)], ids).apply()
    assert float((model(ids) - before).abs().max().detach()) <= 1e-12


@pytest.mark.parametrize("eps_first", [True, False])
def test_it_is_named_rmsnorm_over_and_under_another_form_of_the_norm(eps_first: bool) -> None:
    model = built("GPT2")
    kept, norm = snapshot(model), model.get_submodule("transformer.ln_f")
    both = [SetEps(eps=1e-3), ToRMSNorm()] if eps_first else [ToRMSNorm(), SetEps(eps=1e-3)]
    plans = [make_plan(model, [each], {"input_ids": IDS}).apply() for each in both]
    assert (type(norm).__name__, isinstance(norm, nn.LayerNorm)) == ("RMSNorm", True)
    x = torch.randn(3, 32, dtype=torch.float64) + 1
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), wanted, rtol=1e-12, atol=1e-12)
    plans[1].undo()
    assert type(norm).__name__ == ("LayerNorm" if eps_first else "RMSNorm")
    assert norm(x).isfinite().all()
    plans[0].undo()
    assert snapshot(model) == kept


def test_the_plain_swap_has_the_norms_on_sums_too() -> None:
    model, inputs = bert()
    plan = make_plan(model, [ToRMSNorm(exact=False)], inputs).apply()
    layer = "bert.encoder.layer."
    assert [site.path for site in plan.steps[0][1].sites if site.path.startswith(layer)] == [
        f"{layer}{i}.{own}.LayerNorm" for i in range(2) for own in ("attention.output", "output")
    ]
