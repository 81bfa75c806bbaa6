"""Initialisation: recipes by role, and whether a model looks trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.measures.activations import second_moment
from normprobe.measures.recipes import RECIPES, Drawn, recipes
from normprobe.records import Initialisation, Measurements, RoleMeasure
from normprobe.report.tables.init import make
from tests import models

WIDTH, LAYERS = 64, 4
SMALL = {"vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS}
IDS = torch.randint(3, 500, (2, 8), generator=torch.Generator().manual_seed(1))


def init_of(model: nn.Module, inputs: Any) -> Initialisation:
    found = normprobe.probe(model.eval(), inputs).measurements.init
    assert found is not None
    return found


def roles(init: Initialisation) -> dict[str, RoleMeasure]:
    return {role.role: role for role in init.roles}


def hugging_face(name: str, **fields: Any) -> Initialisation:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(bos_token_id=1, eos_token_id=2, **fields)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return init_of(getattr(transformers, name + head)(config), {"input_ids": IDS})


def test_gpt2_scales_its_writers_by_the_number_of_writes() -> None:
    init = hugging_face("GPT2", vocab_size=512, n_embd=96, n_layer=12, n_head=4)
    found = roles(init)
    assert init.writes == (24,)
    assert (init.trained, found["reader"].distributions) == (False, ("normal",))
    assert found["reader"].recipes == ("fixed_0.02",)
    assert found["writer"].recipes == ("gpt2_depth",)
    assert found["writer"].std[1] == pytest.approx(0.02 / math.sqrt(24), rel=0.02)
    assert found["embedding"].recipes == found["head"].recipes == ("fixed_0.02",)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_fixed_standard_deviation_of_dense_models_and_experts(name: str) -> None:
    more = {"num_local_experts": 4} if name == "Mixtral" else {}
    found = roles(hugging_face(name, num_attention_heads=4, num_key_value_heads=2, **SMALL, **more))
    assert {role: held.recipes for role, held in found.items()} == dict.fromkeys(found, ("fixed_0.02",))
    assert set(found) == {"reader", "writer", "embedding", "head"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Pre-norm blocks with a given initialiser for readers and one for writers."""

    def __init__(self, reads: Callable[[Tensor], Any], writes: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        for block in self.blocks:
            reads(block.up.weight)
            writes(block.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x))


def scaled(scale: float) -> Callable[[Tensor], Any]:
    return lambda w: nn.init.xavier_normal_(w, scale)


INIT = nn.init
STARTS: dict[str, Callable[[Tensor], Any]] = {
    "lecun": lambda w: INIT.normal_(w, std=w.shape[1] ** -0.5),
    "xavier": INIT.xavier_uniform_,
    "kaiming": lambda w: INIT.kaiming_normal_(w, nonlinearity="relu"),
    "kaiming_fan_out": lambda w: INIT.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
    "torch_default": lambda w: INIT.kaiming_uniform_(w, a=math.sqrt(5)),
    "fixed_0.02": lambda w: INIT.trunc_normal_(w, std=0.02, a=-0.04, b=0.04),
    "fixed_0.006": lambda w: INIT.normal_(w, std=0.006),
    "small_init": lambda w: INIT.normal_(w, std=math.sqrt(2 / (5 * WIDTH))),
    "fixed_0.01": lambda w: INIT.normal_(w, std=0.01),
    "orthogonal": INIT.orthogonal_,
    "orthogonal_relu": lambda w: INIT.orthogonal_(w, math.sqrt(2)),
    "gpt2_depth": lambda w: INIT.normal_(w, std=0.02 / math.sqrt(LAYERS)),
    "lecun_depth": lambda w: INIT.normal_(w, std=(w.shape[1] * LAYERS) ** -0.5),
    "xavier_depth": scaled(LAYERS**-0.5),
    "deepnorm": scaled((8 * LAYERS / 2) ** -0.25),
    "t_fixup_encoder": scaled(0.67 * LAYERS**-0.25),
    "t_fixup_decoder": scaled((9 * LAYERS) ** -0.25),
    "wang_init": lambda w: INIT.normal_(w, std=2 / (LAYERS * math.sqrt(WIDTH))),
    "zero": INIT.zeros_,
}


@pytest.mark.parametrize("name", STARTS)
def test_each_recipe_is_named(name: str) -> None:
    found = roles(init_of(Net(STARTS["kaiming"], STARTS[name]), torch.randn(2, 5, WIDTH)))
    assert name in found["writer"].recipes
    assert "kaiming" in found["reader"].recipes


def test_recipes_of_readers_blocks_and_heads() -> None:
    """Fixup divides readers by √N where a branch has two weights, DS-Init block l by √l; muP's head has 1 / fan_in."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512)
            self.net = Net(STARTS["kaiming"], STARTS["kaiming"])

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.net(self.table(ids)))

    torch.manual_seed(0)
    model = Headed()
    nn.init.normal_(model.head.weight, std=1 / WIDTH)
    for number, block in enumerate(model.net.blocks, 1):
        nn.init.normal_(block.up.weight, std=math.sqrt(2 / WIDTH) * LAYERS**-0.5)
        nn.init.xavier_uniform_(block.down.weight, gain=number**-0.5)
    found = roles(init_of(model, IDS))
    assert "fixup" in found["reader"].recipes
    assert "ds_init" in found["writer"].recipes
    assert "mup_head" in found["head"].recipes
    assert "fixed_1" in found["embedding"].recipes


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_another_scale_is_not_named_after_a_recipe(factor: float) -> None:
    found = roles(init_of(Net(scaled(factor), scaled(factor)), torch.randn(2, 5, WIDTH)))
    assert "xavier" not in found["writer"].recipes + found["reader"].recipes


def test_recipes_are_seldom_claimed_by_chance() -> None:
    """Of random scales over two decades few fall into an interval as wide as that of 2^14 normal values."""
    generator = torch.Generator().manual_seed(0)
    drawn = (Drawn(768, 3072, ("reader",), False, "normal", 768, 24, 12, 6, 4, 3072),)
    stds = (10 ** (-3 + 2 * torch.rand(2000, generator=generator))).tolist()
    claimed = [std for std in stds if recipes(drawn, (0.98 * std, 1.02 * std), None)]
    assert len(claimed) < 0.2 * len(stds)


def test_every_recipe_has_its_source_and_its_own_name() -> None:
    assert len({r.name for r in RECIPES}) == len(RECIPES)
    assert all(r.formula and r.source for r in RECIPES)


def test_a_packed_projection_is_judged_by_its_own_fans() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, batch_first=True)
    init = init_of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, WIDTH))
    packed = next(w for w in init.weights if w.parameter.endswith("in_proj_weight"))
    assert "xavier" in packed.recipes
    assert packed.distribution == "uniform"


@pytest.mark.parametrize("parts", [True, False])
def test_a_packed_projection_of_parts_of_several_sizes_is_as_it_was_drawn(parts: bool) -> None:
    """As DeepNorm draws them: values smaller than queries and keys. Rows of sizes of their own fit nothing."""
    torch.manual_seed(0)
    model = models.Decoder([models.Block(models.layer_norm, "pre") for _ in range(3)], models.layer_norm()).eval()
    for name, weight in model.named_parameters():
        if "qkv.weight" in name:
            sizes = torch.tensor([1.0, 1.0, 0.2]).repeat_interleave(models.WIDTH) if parts else torch.rand(len(weight))
            weight.data *= sizes[:, None]
    init = normprobe.probe(model, models.ids()).init
    assert init is not None
    assert [w.distribution for w in init.weights if "qkv" in w.parameter] == ["unknown"] * 3
    assert (init.trained, init.drawn == 1.0) == ((False, True) if parts else (None, False))


def test_a_model_that_learned_is_not_said_to_be_as_it_was_drawn() -> None:
    model = Net(STARTS["torch_default"], STARTS["torch_default"])
    fresh = init_of(model, torch.randn(2, 5, WIDTH))
    assert fresh.trained is False
    model.train()
    x, basis = torch.randn(256, 1, WIDTH), torch.randn(WIDTH, 2) @ torch.randn(2, WIDTH)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        F.mse_loss(model(x), x @ basis).backward()
        optimiser.step()
    trained = init_of(model, torch.randn(2, 5, WIDTH))
    assert trained.trained is True
    assert all(w.recipes == () for w in trained.weights)
    assert trained.evidence[0] == "0 of 10 gains and offsets of norms are at their start"


def test_the_table_has_a_row_for_each_role_and_says_what_it_stands_on() -> None:
    init = init_of(Net(STARTS["kaiming"], STARTS["zero"]), torch.randn(2, 5, WIDTH))
    (table,) = make(Measurements(init=init))
    assert [row[0] for row in table.rows] == ["reader", "writer"]
    reader, writer = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert float(reader["× √fan_in"]) == pytest.approx(math.sqrt(2), rel=0.02)
    assert float(reader["× √fan_out"]) == pytest.approx(math.sqrt(2 * 96 / WIDTH), rel=0.02)
    assert float(reader["E[f²]"]) == pytest.approx(1.0, rel=0.04)
    assert [writer[name] for name in ("distribution", "std", "E[f²]", "recipe")] == ["zero", "0", "0", "zero"]
    assert "weights as they were drawn" in table.caption
    assert table.caption.endswith("; 4 writing branches")


@pytest.mark.parametrize(("trained", "said"), [(True, "the weights look trained"), (None, "could not be told")])
def test_the_table_says_so_where_weights_look_trained_or_that_is_open(trained: bool | None, said: str) -> None:
    init = init_of(Net(STARTS["xavier"], STARTS["zero"]), torch.randn(2, 5, WIDTH))
    (table,) = make(Measurements(init=init.model_copy(update={"trained": trained})))
    assert said in table.caption
    assert table.rows == ()
    assert table.caption.endswith("; ".join(init.evidence))


FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("gain", [0.1, 1.0, 2**0.5, 30.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_moment_behind_a_function(name: Any, gain: float) -> None:
    """Against as many quantiles of the normal distribution."""
    z = torch.special.ndtri((torch.arange(200000, dtype=torch.float64) + 0.5) / 200000)
    expected = float(FUNCTIONS[name](gain * z).square().mean())
    assert second_moment(name, gain) == pytest.approx(expected, rel=2e-3)


def test_second_moments_known_in_closed_form_or_not_at_all() -> None:
    assert second_moment("relu", math.sqrt(2)) == pytest.approx(1.0)
    assert second_moment("relu", 1.0) == 0.5
    assert math.isnan(second_moment("gelu", math.nan) or 0.0)
    assert second_moment("leaky_relu", math.sqrt(2 / 1.04), 0.2) == pytest.approx(1.0)
    assert [second_moment(name, 1.0) for name in ("norm", "softmax", "gate", "leaky_relu", "unknown")] == 5 * [None]


@pytest.mark.parametrize(("function", "name"), [(F.relu, "relu"), (F.gelu, "gelu"), (torch.tanh, "tanh")])
def test_the_moment_of_a_weight_is_that_of_unit_inputs_behind_what_follows_it(function: Any, name: str) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 8)
            nn.init.normal_(self.up.weight, std=0.09)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(function(self.up(x)))

    torch.manual_seed(0)
    model, x = One(), torch.randn(400, 256)
    (found,) = (w for w in init_of(model, x).weights if w.parameter == "up.weight")
    seen = float(function(x.double() @ model.up.weight.detach().double().T).square().mean())
    assert found.followed_by == name
    assert found.moment == pytest.approx(seen, rel=0.03)
    assert found.gain_back == pytest.approx(float(model.up.weight.detach().std()) * math.sqrt(512), rel=0.01)


def test_parameters_that_no_product_uses_are_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell, self.head = nn.Embedding(50, 16), nn.LSTM(16, 16), nn.Linear(16, 50)
            self.start, self.norm = nn.Parameter(torch.zeros(1, 16)), nn.LayerNorm((3, 16))

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.cell(self.table(ids) + self.start)[0]))

    skipped = normprobe.probe(Recurrent(), torch.arange(12).reshape(4, 3)).skipped
    (found,) = (one for one in skipped if one.what.startswith("initialisation"))
    assert found.what == "initialisation of start and 2 more"
    assert found.why == "no product, convolution or lookup with it was seen"


def test_a_table_that_is_the_head_too_gains_by_its_features_there() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.final = nn.Embedding(200, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
            nn.init.normal_(self.table.weight, std=0.02)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return F.linear(self.final(x + self.mlp(self.norm(x))), self.table.weight)

    found = roles(init_of(Tied(), torch.arange(10)[None]))
    std = found["embedding"].std[1]
    assert found["embedding"].gain[1] == pytest.approx(std)
    assert found["head"].gain[1] == pytest.approx(std * math.sqrt(WIDTH))
    assert found["embedding"].gain_back[1] == pytest.approx(std * math.sqrt(WIDTH))
    assert found["head"].gain_back[1] == pytest.approx(std * math.sqrt(200))
