"""muP: what is drawn and multiplied, which rates follow, and that outputs then do not depend on the width."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError, SettingError
from normprobe.optimising.mup import carried_places
from normprobe.rewrites import Effect, Initialise, MuP, Plan, load, make_plan
from normprobe.rewrites.base import Survey
from normprobe.sweeping.roles import places
from tests.rewrites.cases import snapshot

BASE, VOCABULARY, HEADS = 32, 23, 2


class Tiny(nn.Module):
    """A decoder of one block whose heads grow with the width."""

    def __init__(self, width: int, tied: bool = False, bias: bool = True, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(VOCABULARY, width)
        self.first, self.second, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, VOCABULARY, bias=bias)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        h = self.first(x)
        q, k, v = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        logits: Tensor = self.out(self.last(x))
        return logits


def ids(rows: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(3))


def tiny(width: int = 64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Tiny(width, **options).eval()


def applied(model: nn.Module, inputs: Any = None, **settings: Any) -> Plan:
    given = ids() if inputs is None else inputs
    return make_plan(model, [MuP(**{"base_width": BASE, **settings})], given).apply()


def stds(model: nn.Module) -> dict[str, float]:
    return {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}


def rates(model: nn.Module, optimizer: Any, inputs: Any = None) -> dict[str, float]:
    groups = normprobe.parameter_groups(model, 1.0, inputs=ids() if inputs is None else inputs, optimizer=optimizer)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    return {name: group["lr"] for group in groups for name in group["names"]}


def test_weights_are_drawn_as_table_8_has_them() -> None:
    model = tiny(512)
    applied(model)
    found = stds(model)
    for name in ("q", "k", "v", "o", "up"):
        assert found[f"{name}.weight"] == pytest.approx(512**-0.5, rel=0.02)
    assert found["down.weight"] == pytest.approx(1024**-0.5, rel=0.02)
    assert found["table.weight"] == pytest.approx(BASE**-0.5, rel=0.03)
    assert found["out.weight"] == pytest.approx(BASE**-0.5, rel=0.03)
    assert not any(p.detach().any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert bool((model.get_parameter("first.weight") == 1).all())


def test_at_the_base_width_it_is_lecuns_initialisation() -> None:
    ours, theirs = tiny(BASE), tiny(BASE)
    applied(ours, seed=5)
    make_plan(theirs, [Initialise("lecun", seed=5)], ids()).apply()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert torch.equal(ours(ids()), theirs(ids()))


@pytest.mark.parametrize("tied", [False, True])
def test_the_readout_is_multiplied_and_its_bias_is_not(tied: bool) -> None:
    model = tiny(64, tied=tied)
    applied(model)
    with torch.no_grad():
        model.get_parameter("out.bias").copy_(torch.arange(VOCABULARY))
        read = []
        handle = model.get_submodule("last").register_forward_hook(lambda m, args, out: read.append(out))
        logits = model(ids())
        handle.remove()
        weight, bias = model.get_parameter("out.weight"), model.get_parameter("out.bias")
    assert torch.allclose(logits, (read[0] / 2) @ weight.T + bias, atol=1e-5)
    assert Survey.of(model, ids()).anatomy.head.logit_multiplier == pytest.approx(0.5)  # type: ignore[union-attr]


def test_heads_that_grow_are_scaled_by_their_features() -> None:
    model = tiny(64)
    plan = applied(model, base_head_dim=16)
    (site,) = Survey.of(model, ids()).anatomy.attention
    assert site.head_dim == 32
    assert site.scale == pytest.approx(math.sqrt(16) / 32)
    assert "note" not in str(plan)
    assert "attention keeps its scale" in str(make_plan(tiny(64), [MuP(BASE)], ids()))


TABLE: dict[str, tuple[float, float]] = {  # of a model twice as wide: Adam, SGD
    "table.weight": (1.0, 2.0),
    "first.weight": (1.0, 2.0),
    "q.weight": (0.5, 1.0),
    "q.bias": (1.0, 2.0),
    "down.weight": (0.5, 1.0),
    "down.bias": (1.0, 2.0),
    "out.weight": (1.0, 2.0),
    "out.bias": (1.0, 1.0),
}


@pytest.mark.parametrize("tied", [False, True])
def test_rates_of_a_rewritten_model_are_those_of_table_8(tied: bool) -> None:
    model = tiny(64, tied=tied)
    applied(model)
    adam, sgd = rates(model, "adam"), rates(model, "sgd")
    groups = normprobe.parameter_groups(model, 1.0, inputs=ids())
    assert [group["role"] for group in groups if "out.bias" in group["names"]] == ["fixed"]
    assert "unknown" not in {group["role"] for group in groups}
    assert {name: (adam[name], sgd[name]) for name in TABLE if name in adam} == {
        k: v for k, v in TABLE.items() if k in adam
    }


def test_places_by_the_anatomy_agree_with_those_by_two_widths() -> None:
    """Of a model in the standard parametrisation, where the readout is not multiplied, all but its rate."""
    model = tiny(64)
    applied(model)
    for optimizer in ("adam", "sgd"):
        groups = normprobe.parameter_groups(tiny(64), 1.0, tiny(BASE), ids(), optimizer=optimizer)
        by_width = {name: group["lr"] for group in groups for name in group["names"]}
        ours = rates(model, optimizer)
        assert by_width.pop("out.weight") == 0.5
        assert by_width == {name: rate for name, rate in ours.items() if name != "out.weight"}


def test_what_carries_no_base_needs_one_and_what_does_refuses_one() -> None:
    with pytest.raises(SettingError, match=r"the width of the base is not known(.|\n)*MuP"):
        normprobe.parameter_groups(tiny(), 0.1, inputs=ids())
    model = tiny()
    applied(model)
    with pytest.raises(SettingError, match="a base was given for a model that knows its own"):
        normprobe.parameter_groups(model, 0.1, tiny(BASE), ids())
    with pytest.raises(SettingError, match=r"unknown optimizer\n  expected: adam \| adamw \| sgd"):
        normprobe.parameter_groups(model, 0.1, inputs=ids(), optimizer="lion")  # type: ignore[arg-type]
    copied = copy.deepcopy(model)
    assert rates(copied, "adam") == rates(model, "adam")
    assert torch.equal(copied(ids()), model(ids()))


def test_undo_is_bit_for_bit_and_a_second_time_is_refused() -> None:
    model = tiny(64, tied=True)
    before = snapshot(model)
    plan = applied(model, base_head_dim=16)
    assert plan.effect is Effect.BREAKING
    with pytest.raises(RewriteError, match="MuP has multiplied it already"):
        applied(model)
    plan.undo()
    assert snapshot(model) == before
    with pytest.raises(SettingError, match="the width of the base is not known"):
        normprobe.parameter_groups(model, 0.1, inputs=ids())


def grown(rewrite: Any) -> Any:
    """A factory of models that `rewrite` gives their values."""

    def made(width: int) -> tuple[nn.Module, Tensor]:
        model = Tiny(width).eval()
        normprobe.rewrite(model, [rewrite], ids(8))
        return model, ids(8)

    return made


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.01), ("sgd", 1.0)])
def test_outputs_and_their_updates_do_not_depend_on_the_width(optimizer: Any, lr: float) -> None:
    widths = (BASE, 64, 128)
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "steps": 3}
    found = normprobe.coordinate_check(grown(MuP(BASE, 16)), widths, **settings)
    (mup,) = found.sweeps
    assert mup.parametrisation == "mup"
    assert found.optimizer == optimizer
    assert found.findings == ()
    plain = normprobe.coordinate_check(grown(Initialise("lecun")), widths, **settings)
    assert "NP607" in {finding.code for finding in plain.findings}
    assert max(row.update_slope for row in mup.modules) < 0.2
    assert max(row.update_slope for row in plain.sweeps[0].modules) > 0.5


transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LAYERS = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"input_ids": torch.arange(16).reshape(2, 8)}


def hugging(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model


QUERIES = {  # the projection of a block of width 32 with four heads, and which of its features are queries
    "GPT2": ("transformer.h.0.attn.c_attn", [*range(32)]),
    "GPTNeoX": ("gpt_neox.layers.0.attention.query_key_value", [i for i in range(96) if i % 24 < 8]),
    "Bloom": ("transformer.h.0.self_attention.query_key_value", [i for i in range(96) if i % 24 < 8]),
    "Falcon": ("transformer.h.0.self_attention.query_key_value", [*range(32)]),
    "Llama": ("model.layers.0.self_attn.q_proj", [*range(32)]),
}
FIELDS = {"GPT2": {"n_layer": 1, "n_embd": 32, "n_head": 4}, "Bloom": {"n_layer": 1, "hidden_size": 32, "n_head": 4}}


@pytest.mark.parametrize("kind", QUERIES)
def test_queries_are_scaled_alone_wherever_they_lie(kind: str) -> None:
    model, (path, queries) = hugging(kind, **FIELDS.get(kind, LAYERS)), QUERIES[kind]
    names, projection = set(model.state_dict()), model.get_submodule(path)
    plan = applied(model, TOKENS, base_width=16, base_head_dim=2)
    (site,) = Survey.of(model, TOKENS).anatomy.attention
    assert site.scale == pytest.approx(math.sqrt(2) / 8)
    assert site.columns["q"].parameter == f"{path}.weight"
    assert set(model.state_dict()) == names
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        scaled = projection(x)
        plan.undo()
        projection.load_state_dict(drawn(kind, path))
        plain = projection(x)
    plain[..., queries] *= 0.5
    assert torch.allclose(scaled, plain, atol=1e-6)


def drawn(kind: str, path: str) -> dict[str, Tensor]:
    """The values that a projection gets where nothing is scaled: those of LeCun's scheme under the same seed."""
    model = hugging(kind, **FIELDS.get(kind, LAYERS))
    make_plan(model, [Initialise("lecun")], TOKENS).apply()
    return model.get_submodule(path).state_dict()


def test_a_model_in_bfloat16_is_carried() -> None:
    model = tiny(64).bfloat16()
    applied(model, base_head_dim=16)
    (site,) = Survey.of(model, ids()).anatomy.attention
    assert site.scale == pytest.approx(math.sqrt(16) / 32, rel=4e-3)


def test_an_embedding_times_the_root_of_the_width_has_that_of_the_base() -> None:
    model = hugging("Gemma", **LAYERS, head_dim=8, num_key_value_heads=2)
    plan = applied(model, TOKENS, base_width=8)
    anatomy = Survey.of(model, TOKENS).anatomy
    assert anatomy.streams[0].input_multiplier == pytest.approx(8**0.5, rel=1e-3)
    assert anatomy.head is not None
    assert anatomy.head.logit_multiplier == pytest.approx(8 / 32)
    plan.undo()
    assert Survey.of(model, TOKENS).anatomy.streams[0].input_multiplier == pytest.approx(32**0.5, rel=1e-3)


def resized(kind: str, times: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model `times` as wide, with as many more heads of the same size."""
    sizes = {name: times * size for name, size in (LAYERS | {"n_embd": 32, "n_head": 4}).items()}
    more = {**sizes, "num_hidden_layers": 1, "n_layer": 1, "num_key_value_heads": 2 * times, "num_local_experts": 4}
    config = getattr(transformers, f"{kind}Config")(**SMALL | {"vocab_size": 50}, image_size=16, patch_size=8, **more)
    auto = {"ViT": "AutoModelForImageClassification", "Bert": "AutoModelForMaskedLM"}.get(kind, "AutoModelForCausalLM")
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16)} if kind == "ViT" else TOKENS
    return getattr(transformers, auto).from_config(config).eval(), inputs


@pytest.mark.parametrize("kind", ["GPT2", "Mixtral", "Bert", "ViT", "Olmo2"])
def test_places_are_those_that_two_widths_tell(kind: str) -> None:
    (wide, inputs), (base, _) = resized(kind, 2), resized(kind, 1)
    told = places(wide, base, inputs, inputs)
    applied(wide, inputs, base_width=32)
    found = carried_places(wide, inputs)
    assert {name: (p.role, p.ratio, p.fan_out) for name, p in found.items()} == {
        name: (p.role, p.ratio, p.fan_out) for name, p in told.items()
    }


def test_what_chooses_experts_is_a_readout_without_multiplier() -> None:
    model = hugging("Mixtral", **LAYERS, num_key_value_heads=2, num_local_experts=4)
    applied(model, TOKENS, base_width=8)
    gate = "model.layers.0.mlp.gate.weight"
    assert rates(model, "adam", TOKENS)[gate] == rates(model, "sgd", TOKENS)[gate] == 0.25
    assert stds(model)[gate] == pytest.approx(32**-0.5 / 2, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "fields", "settings", "why"),
    [
        ("Granite", {**LAYERS, "attention_multiplier": 0.5}, {"base_head_dim": 4}, "its scale is 0.5, not 1/√8"),
        (
            "Qwen3",
            {**LAYERS, "head_dim": 8, "num_key_value_heads": 2},
            {"base_head_dim": 4},
            "its queries and keys are normed",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused_as_a_whole(
    kind: str, fields: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    model = hugging(kind, **fields)
    plan = make_plan(model, [MuP(BASE, **settings)], TOKENS)
    assert plan.steps[0][1].sites == ()
    assert why in str(plan)


def test_a_readout_without_a_module_of_its_own_is_refused() -> None:
    class Bare(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            x = x + self.down(F.gelu(self.up(self.second(x))))
            return F.linear(self.last(x), self.table.weight)

    plan = make_plan(Bare(64), [MuP(BASE)], ids())
    assert "there is no place for a multiplier" in str(plan)
    body = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8))
    assert "no readout was found" in str(make_plan(body, [MuP(BASE)], ids()))


def test_a_weight_of_unknown_place_stays_and_is_told() -> None:
    config = transformers.T5Config(
        **SMALL | {"pad_token_id": 0}, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4
    )
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]}
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    before = model.get_parameter(name).detach().clone()
    plan = applied(model, inputs, base_width=8)
    assert torch.equal(model.get_parameter(name), before)
    refused = next(line for line in str(plan).splitlines() if "whether the rows of this table grow" in line)
    assert name in refused
    multiplier = Survey.of(model, inputs).anatomy.head.logit_multiplier  # type: ignore[union-attr]
    assert multiplier == pytest.approx(8**-0.5 / 4)  # 1 / √width of its own at the base, and base / width


@pytest.mark.parametrize("settings", [{"base_width": 0}, {"base_width": 1.5}, {"base_head_dim": -1}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RewriteError, match="cannot be made"):
        MuP(**settings)


def test_it_travels_as_json() -> None:
    rewrite = MuP(128, base_head_dim=32, seed=7)
    assert load(json.loads(json.dumps(rewrite.to_dict()))) == rewrite
    assert "width 128 with heads of 32" in rewrite.describe()


@pytest.mark.parametrize(("width", "heads", "base"), [(64, 2, 16), (128, 4, 8), (256, 8, 4), (256, 2, 16)])
def test_no_check_takes_its_scale_for_a_slip(width: int, heads: int, base: int) -> None:
    """√base / d is 1/√width where there are d / base heads: that is meant here, and is said where it is far off."""
    model = tiny(width, heads=heads)
    applied(model, base_head_dim=base)
    report = normprobe.probe(model, ids(), level="backward")
    (told,) = [one for one in report.to_dict()["declared"] if one["fact"] == "attention_scale"]
    assert (told["field"], told["stated"]) == ("MuP.base_head_dim", base)
    found = [one for one in report.findings if one.code in ("NP212", "NP404") or one.code.startswith("NP6")]
    assert {one.severity.value for one in found} <= {"note"}
    far = (width / heads / base) ** 0.5 > 2
    assert [one.code for one in found] == ["NP404"] * far
    assert all(f"as MuP.base_head_dim = {base} states" in one.message for one in found)


def test_a_scale_that_is_no_longer_that_of_the_rewrite_is_told() -> None:
    model = tiny(64)
    applied(model, base_head_dim=16)
    model.get_buffer("q._mup_queries").fill_(0.25)
    report = normprobe.probe(model, ids())
    assert [one.code for one in report.findings if one.code == "NP212"] == ["NP212"]
