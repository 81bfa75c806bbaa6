"""Weights drawn anew: which, from what, and nothing else."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import Initialise, load, make_plan
from normprobe.rewrites.initialise.draw import BLOCK
from normprobe.rewrites.initialise.schemes import kaiming_gain
from normprobe.theory import deepnorm
from tests.rewrites.cases import snapshot

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 211, "bos_token_id": 0, "eos_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 3, "n_embd": 64, "n_head": 4},
    "Llama": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "Falcon": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    "Mixtral": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
    },
}
WRITERS = {
    "GPT2": ("c_proj.weight",),
    "Llama": ("o_proj.weight", "down_proj.weight"),
    "Falcon": ("dense.weight", "dense_4h_to_h.weight"),
    "Mixtral": ("o_proj.weight", "down_proj"),
}
IDS = torch.arange(24).reshape(2, 12)


def built(kind: str, **more: Any) -> nn.Module:
    """A model whose parameters are all far from any start."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **KINDS[kind], **more)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 + torch.randn_like(parameter))
    return model


def applied(model: nn.Module, rewrite: Initialise, inputs: Any = None) -> Any:
    return make_plan(model, [rewrite], {"input_ids": IDS} if inputs is None else inputs).apply()


def std(weight: Tensor) -> float:
    return float(weight.detach().std())


@pytest.mark.parametrize("kind", KINDS)
def test_gpt2_scales_the_writers_by_the_number_of_writes_and_no_other_matrix(kind: str) -> None:
    model = built(kind)
    applied(model, Initialise("gpt2"))
    writes = 2 * model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            wanted = 0.02 / math.sqrt(writes) if name.endswith(WRITERS[kind]) else 0.02
            assert std(parameter) == pytest.approx(wanted, rel=6 / math.sqrt(2 * parameter.numel())), name
            assert abs(float(parameter.detach().mean())) < 6 * wanted / math.sqrt(parameter.numel())
        else:
            value = 0.0 if name.endswith("bias") else 1.0
            assert bool((parameter == value).all()), name


def test_the_matrices_that_transformers_scales_itself_are_the_same() -> None:
    """GPT-2 of transformers 5.24 draws its own writers with 0.02 / √(2 layers)."""
    own = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**SMALL, **KINDS["GPT2"]))
    model = built("GPT2")
    applied(model, Initialise("gpt2"))
    mine = dict(model.named_parameters())
    for name, parameter in own.named_parameters():
        if parameter.dim() > 1:
            assert std(mine[name]) == pytest.approx(std(parameter), rel=12 / math.sqrt(2 * parameter.numel())), name


def test_a_choice_changes_nothing_else_and_gives_the_values_of_the_whole() -> None:
    whole, part = built("GPT2"), built("GPT2")
    before = {name: p.detach().clone() for name, p in part.named_parameters()}
    applied(whole, Initialise("gpt2", seed=5))
    applied(part, Initialise("gpt2", only="writers", seed=5))
    for (name, mine), theirs in zip(part.named_parameters(), whole.parameters(), strict=True):
        meant = "c_proj" in name
        assert torch.equal(mine, theirs if meant else before[name]), name
    other = built("GPT2")
    applied(other, Initialise("gpt2", only=["transformer.h.1.mlp.c_fc.*", "norms"], seed=6))
    moved = {n for n, p in other.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in moved if "ln_" not in n} == {"transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.bias"}
    assert not torch.equal(other.transformer.h[1].mlp.c_fc.weight, whole.transformer.h[1].mlp.c_fc.weight)


def test_undo_is_bit_for_bit_and_parameters_keep_their_identity() -> None:
    model = built("Mixtral").bfloat16()
    before = snapshot(model)
    held = [id(p) for p in model.parameters()]
    plan = applied(model, Initialise("xavier"))
    assert [id(p) for p in model.parameters()] == held
    assert snapshot(model) != before
    plan.undo()
    assert snapshot(model) == before


def test_a_tied_table_is_drawn_once_and_stays_tied() -> None:
    model = built("GPT2")
    plan = applied(model, Initialise("kaiming"))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert std(model.lm_head.weight) == pytest.approx(1 / 8, rel=0.05)
    touched = [name for site in plan.steps[0][1].sites for name in site.touched]
    assert [n for n in touched if "lm_head" in n or "wte" in n] == ["transformer.wte.weight"]


def test_the_padding_row_of_a_table_stays() -> None:
    model = nn.Sequential(nn.Embedding(9, 8, padding_idx=4), nn.Linear(8, 5))
    model[0].weight.data[4] = 0.25
    applied(model, Initialise("gpt2"), torch.arange(9).reshape(1, 9))
    assert bool((model[0].weight[4] == 0.25).all())
    assert std(model[0].weight[:4]) < 0.05


def test_deepnorm_gives_beta_to_values_outputs_and_the_mlp_alone() -> None:
    model = built("GPT2")
    before = model.transformer.wte.weight.detach().clone()
    applied(model, Initialise("deepnorm"))
    beta = deepnorm("decoder", decoder_layers=3)["decoder"].beta
    square = math.sqrt(2 / 128)
    for block in model.transformer.h:
        query, key, value = block.attn.c_attn.weight.split(64, dim=1)
        assert [std(query), std(key)] == pytest.approx([square, square], rel=0.05)
        assert [std(value), std(block.attn.c_proj.weight)] == pytest.approx([beta * square] * 2, rel=0.05)
        assert std(block.mlp.c_fc.weight) == pytest.approx(beta * math.sqrt(2 / 320), rel=0.03)
    assert torch.equal(model.transformer.wte.weight, before)


def test_deepnorm_of_an_encoder_and_decoder_reaches_cross_attention() -> None:
    config = transformers.T5Config(
        vocab_size=211, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=3, num_heads=4
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    applied(model, Initialise("deepnorm"), {"input_ids": IDS, "decoder_input_ids": IDS})
    both = deepnorm("encoder-decoder", encoder_layers=2, decoder_layers=3)
    square = math.sqrt(2 / 128)
    for stack, name in ((model.encoder, "encoder"), (model.decoder, "decoder")):
        attention = stack.block[1].layer[0].SelfAttention
        assert std(attention.v.weight) == pytest.approx(both[name].beta * square, rel=0.05)
        assert std(attention.k.weight) == pytest.approx(square, rel=0.05)
    cross = model.decoder.block[0].layer[1].EncDecAttention
    assert std(cross.v.weight) == pytest.approx(both["decoder"].beta * square, rel=0.05)
    assert std(cross.k.weight) == pytest.approx(square, rel=0.05)


def test_orthogonal_draws_every_expert_and_every_projection_alone() -> None:
    model = built("Mixtral")
    applied(model, Initialise("orthogonal"))
    down = model.model.layers[0].mlp.experts.down_proj.detach().double()  # (experts, 64, 96)
    assert torch.allclose(down @ down.mT, torch.eye(64, dtype=torch.float64).expand(3, 64, 64), atol=1e-5)
    model = built("GPT2")
    applied(model, Initialise("orthogonal"))
    for part in model.transformer.h[0].attn.c_attn.weight.detach().double().split(64, dim=1):
        assert torch.allclose(part.mT @ part, torch.eye(64, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(("name", "function"), [("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu)])
def test_the_gain_of_kaiming_keeps_the_second_moment(name: Any, function: Any) -> None:
    torch.manual_seed(0)
    z = torch.randn(2_000_000, dtype=torch.float64)
    assert float(function(kaiming_gain(name) * z).square().mean()) == pytest.approx(1.0, rel=0.01)


def test_kaiming_takes_the_gain_of_the_function_that_follows() -> None:
    model = built("GPT2", activation_function="relu")
    applied(model, Initialise("kaiming"))
    mlp = model.transformer.h[0].mlp
    assert std(mlp.c_fc.weight) == pytest.approx(math.sqrt(2 / 64), rel=0.03)
    assert std(mlp.c_proj.weight) == pytest.approx(math.sqrt(1 / 256), rel=0.03)


def test_xavier_is_uniform_with_the_fans_of_each_projection_and_no_two_weights_are_alike() -> None:
    model = built("GPT2")
    applied(model, Initialise("xavier"))
    first, second = (block.mlp.c_fc.weight.detach() for block in model.transformer.h[:2])
    bound = math.sqrt(6 / (64 + 256))
    assert bound * 0.999 < float(first.abs().amax()) <= bound
    assert std(first) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert float((first * second).mean().abs()) < 0.05 * bound**2
    query = model.transformer.h[0].attn.c_attn.weight[:, :64]
    assert std(query) == pytest.approx(math.sqrt(2 / 128), rel=0.05)


def test_zero_writers_makes_every_branch_silent_and_leaves_the_rest() -> None:
    model = built("Llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    applied(model, Initialise("zero_writers"))
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.endswith(("o_proj.weight", "down_proj.weight"))}
    assert all(not model.get_parameter(n).any() for n in moved)


def test_gains_that_the_norm_adds_one_to_start_at_zero() -> None:
    config = transformers.GemmaConfig(**SMALL, **KINDS["Llama"], head_dim=16, num_key_value_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.add_(0.5 if "norm" in name else 0.0)
    applied(model, Initialise("gpt2"))
    assert all(not p.any() for n, p in model.named_parameters() if "norm" in n)


@pytest.mark.parametrize(
    "settings", [{"scheme": "gpt3"}, {"only": ""}, {"only": []}, {"only": [3]}, {"only": 7}, {"seed": -1}]
)
def test_what_cannot_be_meant_is_refused(settings: Any) -> None:
    with pytest.raises(RewriteError, match="expected"):
        Initialise(**settings)


def test_it_goes_to_plain_values_and_back() -> None:
    rewrite = Initialise("small", only=("writers", "head"), seed=4)
    assert load(rewrite.to_dict()) == rewrite
    assert load({**rewrite.to_dict(), "only": ["writers", "head"]}) == rewrite


def test_weights_that_are_computed_from_others_are_refused_by_name() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    plan = make_plan(model, [Initialise("xavier")], torch.randn(2, 8))
    touched = [name for site in plan.steps[0][1].sites for name in site.touched]
    assert touched == ["1.weight", "1.bias"]


def test_a_choice_that_names_nothing_is_an_error() -> None:
    with pytest.raises(
        RewriteError,
        match=r"(?s)only='model.layer.\*' covers no place of Initialise.*some of model.embed_tokens.weight, ",
    ):
        applied(built("Llama"), Initialise("gpt2", only="model.layer.*"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scheme", ["gpt2", "xavier"])
@pytest.mark.parametrize("rows", [1, 4096, 3 * BLOCK // 1024 + 1])
def test_a_weight_is_drawn_block_by_block_by_as_many_generators(scheme: str, rows: int, threads: int) -> None:
    model = nn.Sequential(nn.Linear(1024, rows, bias=False))
    with threads_of_torch(threads):
        applied(model, Initialise(scheme, seed=4), torch.randn(2, 1024))
    whole = torch.empty(rows * 1024)
    for number, block in enumerate(whole.split(BLOCK)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"4 0.weight{f' {number}' * bool(number)}".encode()))
        if scheme == "gpt2":
            block.normal_(0.0, 0.02, generator=generator)
        else:
            bound = math.sqrt(3) * math.sqrt(2 / (1024 + rows))
            block.uniform_(-bound, bound, generator=generator)
    assert torch.equal(model[0].weight.detach().reshape(-1), whole)


@pytest.mark.parametrize(("kind", "name"), [("GPT2", "h.1.attn.c_attn"), ("Llama", "layers.1.self_attn.q_proj")])
def test_projections_that_are_drawn_alike_are_drawn_as_one(kind: str, name: str) -> None:
    model = built(kind)
    applied(model, Initialise("gpt2", seed=4))
    path = next(path for path, _ in model.named_modules() if path.endswith(name))
    found = model.get_submodule(path).weight.detach()
    generator = torch.Generator().manual_seed(zlib.crc32(f"4 {path}.weight".encode()))
    assert torch.equal(found, torch.empty(found.shape).normal_(0.0, 0.02, generator=generator))


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
