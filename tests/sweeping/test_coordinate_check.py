"""Slopes of known networks, the transfer of the learning rate under muP, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import normprobe
from normprobe.cli.commands import app
from normprobe.errors import SettingError
from normprobe.sweeping.check import _row
from normprobe.sweeping.fields import sizing
from normprobe.sweeping.steps import Scale, slope, train
from tests.models import SMALL

WIDTHS = (64, 128, 256, 512)


def mlp(width: int) -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)]
    return nn.Sequential(*layers), torch.randn(32, 8)


@pytest.fixture(scope="module")
def checked() -> Any:
    return normprobe.coordinate_check(mlp, WIDTHS, lr=0.01, steps=3, lrs=[1e-3, 1e-2, 1e-1])


def test_hidden_updates_grow_under_standard_parametrisation_and_do_not_under_mup(checked: Any) -> None:
    standard, mup = checked.sweeps
    assert (standard.parametrisation, mup.parametrisation) == ("standard", "mup")
    rows = {row.path: row for row in standard.modules}
    assert rows["2"].verdict == rows["4"].verdict == "growing"
    assert rows["2"].update_slope > 0.5
    assert rows["0"].verdict == "constant"
    assert {row.verdict for row in mup.modules} == {"constant"}
    assert all(abs(row.update_slope) < 0.2 for row in mup.modules)


def test_the_smallest_width_is_the_same_under_both(checked: Any) -> None:
    standard, mup = checked.sweeps
    for a, b in zip(standard.modules, mup.modules, strict=True):
        assert (a.activation[0], a.update[0]) == (b.activation[0], b.update[0])


def test_the_best_learning_rate_moves_under_standard_parametrisation_alone(checked: Any) -> None:
    standard, mup = checked.sweeps
    assert standard.rates.best[-1] < standard.rates.best[0]
    assert len(set(mup.rates.best)) == 1


def test_the_slope_is_exact_on_a_power_law() -> None:
    assert slope({size: 3 * size**0.7 for size in (10, 30, 100)}) == pytest.approx(0.7)
    assert math.isnan(slope({10: 1.0}))
    assert math.isnan(slope({10: 1.0, 20: 0.0}))
    assert math.isnan(slope({10: 1.0, 20: math.inf}))


def test_one_step_of_adam_moves_every_weight_by_the_rate() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    train(
        model,
        torch.randn(5, 3),
        [{"params": list(model.parameters()), "lr": 0.01}],
        1,
        lambda output, inputs: output.square().mean(),
        "adam",
    )
    assert (model.weight - before).abs().detach() == pytest.approx(0.01, rel=1e-4)


def test_a_step_of_sgd_moves_every_weight_by_the_rate_times_its_gradient() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    model(x).square().mean().backward()
    wanted = (model.weight - 0.1 * model.weight.grad).detach()
    groups = [{"params": list(model.parameters()), "lr": 0.1}]
    train(model, x, groups, 1, lambda output, inputs: output.square().mean(), "sgd")
    assert torch.allclose(model.weight, wanted)


def test_an_unknown_optimizer_is_refused_and_the_known_one_is_told() -> None:
    with pytest.raises(SettingError, match="unknown optimizer"):
        normprobe.coordinate_check(mlp, [4, 8], optimizer="lion")  # type: ignore[arg-type]
    assert normprobe.coordinate_check(mlp, [4, 8], steps=1, optimizer="sgd").optimizer == "sgd"
    assert normprobe.coordinate_check(mlp, [4, 8], steps=1).optimizer == "adam"


def test_a_module_that_does_not_move_has_no_verdict() -> None:
    def frozen(width: int) -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.ReLU(), nn.Linear(width, width)), torch.randn(4, width)

    report = normprobe.coordinate_check(frozen, [4, 8])
    rows = {row.path: row.verdict for row in report.sweeps[0].modules}
    assert rows["0"] == "unknown"


def test_a_loss_of_ones_own_and_the_random_state() -> None:
    state = torch.get_rng_state()
    seen = []

    def loss(output: Tensor, inputs: Any) -> Tensor:
        seen.append(output.shape)
        return output.abs().mean()

    normprobe.coordinate_check(mlp, [8, 16], loss=loss, steps=1)
    assert seen
    assert torch.equal(torch.get_rng_state(), state)


class Reader(nn.Module):
    """Logits of token ids, without a configuration or a name that says so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.readout = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.table(ids))


def test_the_loss_is_that_of_probe_and_is_named(tmp_path: Path) -> None:
    ids = torch.randint(0, 11, (2, 6))
    probed = normprobe.probe(Reader(8), ids, level="backward").gradients
    swept = normprobe.coordinate_check(lambda width: (Reader(width), ids), [8, 16], steps=1)
    assert swept.loss == probed.loss == "cross-entropy of the next token"
    assert normprobe.coordinate_check(mlp, [8, 16], steps=1).loss == (
        "mean squared distance of the first output from unit normal noise"
    )
    (tmp_path / "net.py").write_text(
        "from torch import nn, randn\n\ndef build(width):\n    return nn.Linear(3, width), randn(4, 3)\n"
    )
    arguments = ["sweep", f"{tmp_path / 'net.py'}:build", "--widths", "4,8"]
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    assert "loss: mean squared distance" in text
    assert "both slopes within ±0.25, a choice" in text
    assert "expected under muP" in text


def test_help_names_no_option_that_sweep_lacks() -> None:
    help = CliRunner().invoke(app, ["sweep", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    assert "--widths" in help
    assert "--config-only" not in help


def test_the_size_that_does_not_run_is_named() -> None:
    def odd(width: int) -> tuple[nn.Module, Tensor]:
        return nn.Linear(8, width), torch.randn(2, 8 if width < 10 else 9)

    with pytest.raises(SettingError, match="the model of size 16 does not run") as raised:
        normprobe.coordinate_check(odd, [4, 16])
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in str(raised.value)


@pytest.mark.parametrize(
    ("activation", "update", "verdict"),
    [(-0.5, 0.0, "shrinking"), (-0.5, -0.5, "vanishing"), (0.0, 0.3, "growing"), (0.24, -0.24, "constant")],
)
def test_an_output_that_shrinks_alone_is_told_apart(activation: float, update: float, verdict: str) -> None:
    found = {n: Scale(float(n) ** activation, float(n) ** update) for n in (8, 64)}
    assert _row("a", found).verdict == verdict


def test_depths_have_no_mup() -> None:
    def deep(depth: int) -> tuple[nn.Module, Tensor]:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))), torch.randn(3, 4)

    report = normprobe.coordinate_check(deep, [2, 4], axis="depth")
    assert [sweep.parametrisation for sweep in report.sweeps] == ["standard"]
    assert [row.path for row in report.sweeps[0].modules] == ["0", "1", "."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": [8]}, "a sweep needs sizes"),
        ({"widths": [8, 8]}, "a sweep needs sizes"),
        ({"widths": [8, 16], "steps": 0}, "a sweep needs steps"),
        ({"widths": [8, 16], "lr": math.nan}, "a learning rate makes no sense"),
        ({"widths": [8, 16], "lrs": [0.0]}, "a learning rate makes no sense"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        normprobe.coordinate_check(mlp, **arguments)


def config(kind: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**(SMALL | fields))


@pytest.mark.parametrize(
    ("kind", "model", "more", "width", "depth"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}, "hidden_size", "num_hidden_layers"),
        ("BertConfig", "BertForMaskedLM", {}, "hidden_size", "num_hidden_layers"),
        ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "n_embd", "n_layer"),
    ],
)
def test_the_fields_of_a_configuration_are_found_by_what_they_change(
    kind: str, model: str, more: dict[str, Any], width: str, depth: str
) -> None:
    import transformers

    with torch.device("meta"):
        built = getattr(transformers, model)(config(kind, **more))
    wide = sizing(built, "width")
    assert wide.fields[0] == (width, 32)
    assert "vocab_size" not in dict(wide.fields)
    assert wide(64).get_input_embeddings().weight.shape == (64, 64)
    assert [name for name, _ in sizing(built, "depth").fields] == [depth]
    with pytest.raises(SettingError, match=r"no model can be built|no whole number"):
        wide(33)


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 2}
STATES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


@pytest.mark.parametrize(
    ("kind", "model", "more", "taken", "left"),
    [
        ("MambaConfig", "MambaForCausalLM", STATES, {"intermediate_size"}, {"num_hidden_layers"}),
        ("MixtralConfig", "MixtralForCausalLM", EXPERTS, {"intermediate_size"}, {"num_local_experts"}),
        (
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            LATENT | ROUTED | {"num_key_value_heads": 4},
            {"moe_intermediate_size", "kv_lora_rank"},
            {"num_attention_heads"},  # with it alone the keys of all heads no longer fit
        ),
    ],
)
def test_fields_are_varied_together_where_the_model_runs_so(
    kind: str, model: str, more: dict[str, Any], taken: set[str], left: set[str]
) -> None:
    import transformers

    made = getattr(transformers, kind)(**more) if "state_size" in more else config(kind, **more)
    with torch.device("meta"):
        built = getattr(transformers, model)(made)
    wide = sizing(built, "width")
    names = [name for name, _ in wide.fields]
    assert names[0] == "hidden_size"
    assert taken <= set(names)
    assert not left & set(names)
    with torch.no_grad():
        assert wide(64).eval()(torch.arange(8)[None]).logits.shape == (1, 8, 64)


class Sizes:
    """A configuration of three numbers."""

    def __init__(self, vocab_size: int = 16, width: int = 8, rigid: int = 12) -> None:
        self.vocab_size, self.width, self.rigid = vocab_size, width, rigid

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, fields: dict[str, int]) -> Sizes:
        return cls(**fields)


class Rigid(nn.Module):
    """Runs at one size of its inner layer only."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.up, self.down = nn.Linear(config.width, config.rigid), nn.Linear(config.rigid, config.width)

    def forward(self, input_ids: Tensor) -> Tensor:
        inner = self.up(self.table(input_ids))
        return torch.as_tensor(self.down(inner.unflatten(-1, (3, 4)).flatten(-2)))


def test_a_field_at_whose_double_the_model_does_not_run_is_left() -> None:
    with torch.device("meta"):
        built = Rigid(Sizes())
    assert sizing(built, "width").fields == (("width", 8),)


def test_a_model_without_configuration_is_refused() -> None:
    with pytest.raises(SettingError, match=r"(?s)no configuration to vary.*def factory\(width\)"):
        sizing(nn.Linear(2, 2), "width")


FACTORY = """
import torch
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)), torch.randn(4, 8)

def none():
    return nn.Linear(2, 2)
"""


def test_the_command_takes_a_factory_of_widths(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text(FACTORY)
    command = ["sweep", f"{path}:net", "--widths", "8,16", "--lr", "1e-3:1e-2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "standard parametrisation" in result.stdout
    assert "loss by learning rate" in result.stdout
    table = result.stdout.split("loss by learning rate")[1].split("muP")[0].split()
    document = json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).stdout)
    rows = [table[index : index + 5] for index in (6, 11)]
    assert table[4:6] == ["best", "rate"]
    for row, losses in zip(rows, document["sweeps"][0]["rates"]["losses"], strict=True):
        assert float(row[4]) == pytest.approx([1e-3, 10**-2.5, 1e-2][losses.index(min(losses))], rel=0.01)
    document = json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).stdout)
    assert document["sizes"] == [8, 16]
    assert document["sweeps"][0]["rates"]["rates"] == pytest.approx([1e-3, 10**-2.5, 1e-2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--widths", "8,16"], "not a factory of sizes"),
        (["net"], "--widths or --depths"),
        (["net", "--widths", "8,x"], "the sizes are no numbers"),
        (["net", "--widths", "8,16", "--lr", "0:1"], "--lr is no rate"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = tmp_path / "made.py"
    path.write_text(FACTORY)
    result = CliRunner().invoke(app, ["sweep", f"{path}:{arguments[0]}", *arguments[1:]])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_language_model_needs_no_inputs() -> None:
    import transformers

    def model(width: int) -> nn.Module:
        made = config("LlamaConfig", hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1)
        return transformers.LlamaForCausalLM(made)

    standard, mup = normprobe.coordinate_check(model, [32, 64, 128], steps=3).sweeps
    assert {row.path: row.verdict for row in standard.modules}["model.layers.0.mlp.down_proj"] == "growing"
    verdicts = {row.path: row.verdict for row in mup.modules if row.path != "model.rotary_emb"}
    assert {path for path, verdict in verdicts.items() if verdict == "shrinking"} == {".", "lm_head"}
    assert set(verdicts.values()) == {"constant", "shrinking"}
    roles = {name: g["role"] for g in normprobe.parameter_groups(model(64), 0.1, model(32)) for name in g["names"]}
    assert roles["model.embed_tokens.weight"] == "input"
    assert roles["lm_head.weight"] == "readout"
    assert roles["model.layers.0.self_attn.q_proj.weight"] == "hidden"


def test_the_logits_of_a_shared_table_do_not_grow_under_mup() -> None:
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.table = nn.Embedding(16, width)
            self.mix = nn.Linear(width, width)
            self.out = nn.Linear(width, 16, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return torch.as_tensor(self.out(x + self.mix(x)))

    ids = torch.arange(16)[None]
    report = normprobe.coordinate_check(lambda width: (Tied(width), ids), WIDTHS, lr=0.1)
    slopes = [{row.path: row.update_slope for row in sweep.modules}["out"] for sweep in report.sweeps]
    assert slopes[0] > 0.5
    assert abs(slopes[1]) < 0.25
    assert "table.weight: it is embedding and readout in one" in report.notes[0]
