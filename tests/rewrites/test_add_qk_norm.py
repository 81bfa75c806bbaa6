"""Norms on queries and keys: where they sit, what they compute, how they start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.rewrites import AddQKNorm, Effect, Plan, load, make_plan
from tests.rewrites.cases import snapshot

transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).reshape(2, 16) * 3
SIZE = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {**LAYERS, "intermediate_size": 48, "num_key_value_heads": 2},
    "GPT2": {"n_layer": 2, "n_embd": 32, "n_head": 4},
    "GPTNeoX": {**LAYERS, "intermediate_size": 48},
    "Falcon": LAYERS,
}


def built(kind: str, **more: Any) -> nn.Module:
    """A model whose heads have logits of a few units, each head with a length of its own."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**SIZE, **{**KINDS.get(kind, {}), **more})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 * (1 + torch.rand_like(parameter[:, :1])))
    return model


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids)["logits"]
    return out


def applied(model: nn.Module, **settings: Any) -> Plan:
    return make_plan(model, [AddQKNorm(**settings)], {"input_ids": IDS}).apply()


@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_reads_as_normed_and_undo_is_bit_for_bit(kind: str) -> None:
    model = built(kind)
    before, names = snapshot(model), set(model.state_dict())
    plan = applied(model)
    assert plan.effect is Effect.BREAKING
    report = normprobe.probe(model, {"input_ids": IDS}, exact=True)
    for site in report.anatomy.attention:
        assert site.qk_norm is not None
        assert (site.qk_norm.kind, site.qk_norm.axis) == ("rmsnorm", "head")
        assert site.qk_norm.rope in ("before", "none")
    bound = model.config.hidden_size / model.config.num_attention_heads  # d · scale · 1 · 1, in units of the scale
    found = {site.path: site for site in report.anatomy.attention}
    for site in report.attention:
        most = bound * (found[site.path].scale or 0.0)
        assert all(head.sampled_max <= most * (1 + 1e-5) for head in site.heads)
    assert set(model.state_dict()) > names
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in set(model.state_dict()) - names} == {
        "q_norm",
        "k_norm",
    }
    plan.undo()
    assert snapshot(model) == before


def test_it_is_qwen3_s_norm_before_rotary() -> None:
    """A Llama with a shared gain of ones computes what Qwen3 with the same weights does."""
    model = built("Llama")
    applied(model, shared=True, eps=1e-6)
    config = transformers.Qwen3Config(
        **SIZE, **KINDS["Llama"], head_dim=8, rms_norm_eps=1e-6, tie_word_embeddings=False
    )
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights = {
        name.replace("q_proj.q_norm", "q_norm").replace("k_proj.k_norm", "k_norm"): value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(weights)
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX"])
def test_of_a_packed_projection_the_values_keep_their_bits(kind: str) -> None:
    model = built(kind)
    seen: list[Tensor] = []
    name, module = next((n, m) for n, m in model.named_modules() if n.endswith(("c_attn", "query_key_value")))
    module.register_forward_hook(lambda m, args, output: seen.append(output.detach()))
    logits(model)
    raw = seen.pop()
    columns = normprobe.probe(model, {"input_ids": IDS}, level="structure").anatomy.attention[0].columns
    applied(model)
    seen.clear()
    logits(model)
    normed = seen.pop()
    for part, held in columns.items():
        for spans in held.heads:
            (start, stop) = spans[0]
            old, new = raw[..., start:stop], normed[..., start:stop]
            wanted = old if part == "v" else old / (old.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            torch.testing.assert_close(new, wanted, rtol=0 if part == "v" else 1e-5, atol=0 if part == "v" else 1e-6)
    assert name


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_calibrated_gains_are_the_median_rms_that_each_head_had(kind: str) -> None:
    model = built(kind)
    twin = copy.deepcopy(model)
    applied(model, start="calibrated")
    name = "model.layers.1.self_attn.k_proj" if kind == "Llama" else "transformer.h.1.attn.c_attn"
    heads, start = (2, 0) if kind == "Llama" else (4, 32)
    seen: list[Tensor] = []
    twin.get_submodule(name).register_forward_hook(lambda m, args, output: seen.append(output.detach()))
    logits(twin)
    rows = seen[0][..., start : start + heads * 8].reshape(-1, heads, 8)
    wanted = rows.square().mean(-1).sqrt().median(0).values
    gain = model.get_submodule(name).k_norm.weight
    torch.testing.assert_close(gain.detach(), wanted.unsqueeze(-1).expand(heads, 8), rtol=1e-5, atol=1e-6)


def test_padding_is_left_out_of_the_calibration() -> None:
    padded = torch.cat((IDS, torch.full((2, 48), 7)), 1)
    mask = (torch.arange(64) < 16).long().expand(2, 64)
    with_padding, without = built("Llama"), built("Llama")
    make_plan(with_padding, [AddQKNorm(start="calibrated")], {"input_ids": padded, "attention_mask": mask}).apply()
    applied(without, start="calibrated")
    name = "model.layers.1.self_attn.q_proj.q_norm.weight"
    torch.testing.assert_close(with_padding.get_parameter(name), without.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_distilled_gains_come_nearer_to_the_model_than_calibrated_ones_and_nothing_else_moves() -> None:
    kl = {}
    for start in ("calibrated", "distilled"):
        model = built("Llama")
        before = logits(model).log_softmax(-1)
        held = {name: p.detach().clone() for name, p in model.named_parameters()}
        plan = applied(model, start=start, steps=40)
        after = logits(model).log_softmax(-1)
        kl[start] = float((before.exp() * (before - after)).sum(-1).mean())
        assert plan.proof is not None
        assert plan.proof.kl == pytest.approx(kl[start], rel=1e-3)
        assert all(torch.equal(p, held[n]) for n, p in model.named_parameters() if n in held)
        assert all(p.grad is None for p in model.parameters())
    assert kl["distilled"] < 0.9 * kl["calibrated"], kl


@pytest.mark.parametrize(("kind", "axis"), [("layernorm", "head"), ("l2norm", "head"), ("rmsnorm", "full")])
def test_kinds_and_axes_are_read_as_they_were_asked_for(kind: Any, axis: Any) -> None:
    model = built("Llama")
    applied(model, kind=kind, axis=axis)
    for site in normprobe.probe(model, {"input_ids": IDS}, level="structure").anatomy.attention:
        assert site.qk_norm is not None
        assert (site.qk_norm.kind, site.qk_norm.axis) == (kind, axis)


def bounds(plan: Plan) -> list[float]:
    lines = [line for line in str(plan).splitlines() if line.startswith("now: ")]
    return [float(line.split("|logit| <= ")[1].split(",")[0]) for line in lines]


@pytest.mark.parametrize("start", ["unit", "calibrated"])
@pytest.mark.parametrize(("kind", "axis"), [("layernorm", "head"), ("l2norm", "head"), ("rmsnorm", "full")])
def test_no_logit_exceeds_the_bound_that_the_gains_imply(kind: Any, axis: Any, start: Any) -> None:
    model = built("Llama")
    plan = applied(model, kind=kind, axis=axis, start=start)
    measured = normprobe.probe(model, {"input_ids": IDS}, exact=True).attention
    for site, bound in zip(measured, bounds(plan), strict=True):
        largest = max(head.sampled_max for head in site.heads)
        assert bound / (40 if axis == "full" else 4) < largest <= bound * 1.001
    plan.undo()
    assert not bounds(plan)


@pytest.mark.parametrize(("kind", "keys", "most"), [("GPT2", [1, 1, 2, 4], 12), ("Llama", [1, 2], 10)])
def test_the_bound_is_that_of_the_longest_query_and_key_which_may_meet(
    kind: str, keys: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are √d · gain, the factor 1 / √d: |logit| <= √d · g_q · g_k. Where heads share keys, any two may meet."""
    gains = {"q": [1, 5, 2, 3], "k": keys}

    def fit(self: AddQKNorm, model: nn.Module, sites: Any, inputs: Any) -> None:
        for name, norm in ((name, p) for name, p in model.named_parameters() if "_norm.weight" in name):
            norm.data.copy_(torch.tensor(gains[name.rpartition(".")[0][-6]]).unsqueeze(-1).expand(-1, 8))

    monkeypatch.setattr(AddQKNorm, "fit", fit)
    assert bounds(applied(built(kind))) == pytest.approx([8**0.5 * most] * 2, rel=1e-3)


def test_the_l2_norm_starts_at_unit_rms_and_learns_one_length_a_head() -> None:
    one, other = built("Llama"), built("Llama")
    applied(one, kind="l2norm", eps=1e-12)
    applied(other, kind="rmsnorm", eps=1e-12)
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-5, atol=1e-5)
    assert one.model.layers[0].self_attn.q_proj.q_norm.weight.shape == (4, 1)


def test_gradients_reach_the_gains_and_copies_carry_them() -> None:
    model = built("GPTNeoX")
    applied(model)
    model(input_ids=IDS, labels=IDS)["loss"].backward()
    assert all(bool(p.grad.any()) for n, p in model.named_parameters() if "_norm.weight" in n and p.grad is not None)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


class Packed(nn.Module):
    """nn.MultiheadAttention holds its projections in one parameter and no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(128, 32), nn.LayerNorm(32)
        self.attend, self.head = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.norm(x)
        out: Tensor = self.head(x + self.attend(y, y, y, need_weights=False)[0])
        return out


def test_where_no_module_returns_queries_or_they_are_normed_it_is_refused() -> None:
    (refused,) = make_plan(Packed(), [AddQKNorm()], IDS).steps[0][1].refused
    assert "no module returns its queries and keys" in refused.why
    model = built("Llama")
    applied(model)
    refused, *_ = make_plan(model, [AddQKNorm()], {"input_ids": IDS}).steps[0][1].refused
    assert "normed already" in refused.why


@pytest.mark.parametrize(
    "settings", [{"kind": "batchnorm"}, {"axis": "tokens"}, {"start": "warm"}, {"eps": 0.0}, {"steps": 0}, {"only": []}]
)
def test_what_cannot_be_meant_is_refused(settings: Any) -> None:
    with pytest.raises(RewriteError, match="expected"):
        AddQKNorm(**settings)


def test_it_goes_to_plain_values_and_back_and_only_chooses_sites() -> None:
    rewrite = AddQKNorm(start="calibrated", only=("model.layers.0.*",))
    assert load(rewrite.to_dict()) == rewrite
    model = built("Llama")
    assert {site.path.split(".")[2] for site in make_plan(model, [rewrite], {"input_ids": IDS}).steps[0][1].sites} == {
        "0"
    }


def test_labels_among_the_inputs_change_nothing_of_the_distillation_and_the_proof() -> None:
    """With labels the model returns its loss first, a number that no distribution is made of."""
    plain, labelled = built("Llama"), built("Llama")
    plans = [
        make_plan(model, [AddQKNorm(start="distilled", steps=4)], {"input_ids": IDS, **more}).apply()
        for model, more in ((plain, {}), (labelled, {"labels": IDS}))
    ]
    gains = {name: p for name, p in plain.named_parameters() if "_norm.weight" in name}
    assert all(torch.equal(labelled.get_parameter(name), p) for name, p in gains.items())
    proofs = [plan.proof for plan in plans]
    assert proofs[0] is not None
    assert proofs[1] is not None
    assert proofs[0].kl == proofs[1].kl
    assert proofs[1].tokens == IDS.numel()


def test_a_number_cannot_be_distilled() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = built("Llama")

        def forward(self, input_ids: Tensor) -> Tensor:
            loss: Tensor = self.model(input_ids=input_ids, labels=input_ids).loss
            return loss

    with pytest.raises(RewriteError, match=r"(?s)cannot be distilled.*output of shape \(\)"):
        make_plan(Loss(), [AddQKNorm(start="distilled", steps=2)], {"input_ids": IDS}).apply()


@pytest.mark.parametrize("version", [2, 3])
def test_latent_attention_is_refused(version: int) -> None:
    import transformers

    kind = getattr(transformers, f"DeepseekV{version}Config")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
    parts = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 64}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = kind(**sizes, **heads, **parts, **routed, first_k_dense_replace=1)
    model = getattr(transformers, f"DeepseekV{version}ForCausalLM")(config).eval()
    plan = make_plan(model, [AddQKNorm()], {"input_ids": torch.arange(12)[None]})
    [(_, found)] = plan.steps
    assert found.sites == ()
    assert [each.path for each in found.refused] == [f"model.layers.{i}.self_attn" for i in range(2)]
