"""`probe` from inputs to report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import InputError, SettingError
from normprobe.report.report import Report
from tests.models import (
    HEADS,
    LAYERS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    decoder,
    gpt2,
    ids,
    layer_norm,
    shuffled,
    torch_encoder,
)


class Words:
    """A tokenizer of one id a character."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        row = torch.tensor([[3 + ord(c) % (VOCABULARY - 3) for c in text]])
        return {"input_ids": row, "attention_mask": torch.ones_like(row)}


# ---- inputs


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (ids(), "given by the caller: 2 × 8"),
        ((ids(),), "given by the caller: 2 × 8"),
        ({"input_ids": ids()}, "given by the caller: input_ids 2 × 8"),
    ],
)
def test_inputs_in_every_form(inputs: Any, said: str) -> None:
    model, _ = decoder("pre", layers=1)
    report = normprobe.probe(model, inputs)
    assert report.data.target.inputs == said
    assert report.anatomy.streams[0].depth == 2
    assert report.residual[0].states[0].finite


def test_inputs_of_any_form_give_the_same_numbers() -> None:
    model, _ = decoder("pre", layers=1)
    forms = (ids(), (ids(),), [ids()], {"input_ids": ids()})
    first, *others = [normprobe.probe(model, form).data.measurements for form in forms]
    assert others == [first] * 3


def test_text_with_a_tokenizer() -> None:
    model, _ = gpt2()
    report = normprobe.probe(model, "a short text", tokenizer=Words())
    said = "text of 12 characters: input_ids 1 × 12; attention_mask 1 × 12"
    assert report.data.target.inputs == said
    given = normprobe.probe(model, Words()("a short text", return_tensors="pt"))
    assert report.data.measurements == given.data.measurements


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(InputError, match="a text was given without a tokenizer\n  try: pass tokenizer"):
        normprobe.probe(gpt2()[0], "a text")


def test_no_inputs_with_a_config() -> None:
    model, _ = gpt2()
    report = normprobe.probe(model, level="structure")
    assert report.anatomy.streams[0].final_norm == "transformer.ln_f"
    assert "random" in report.data.target.inputs
    assert report.data == normprobe.probe(model, level="structure").data


def test_no_inputs_without_a_config() -> None:
    with pytest.raises(InputError, match=r"no inputs were given and none can be made(.|\n)*try: pass inputs"):
        normprobe.probe(decoder("pre", layers=1)[0])


def test_empty_inputs() -> None:
    with pytest.raises(InputError, match="the inputs are empty\n  expected: tensors with at least one element"):
        normprobe.probe(decoder("pre", layers=1)[0], ids()[:0])


def test_the_summary_says_no_exponent_where_there_is_none() -> None:
    text = str(normprobe.probe(decoder("pre", layers=1)[0], ids()))
    assert " rms " in text
    assert "exponent" not in text


def test_inputs_that_the_model_rejects() -> None:
    model, _ = torch_encoder(True, False)
    with pytest.raises(InputError, match=r"the forward of TransformerEncoder raised\n  found: \w+: ") as caught:
        normprobe.probe(model, torch.randn(2, TOKENS, WIDTH + 1))
    cause = caught.value.__cause__
    assert isinstance(cause, (RuntimeError, AssertionError))
    assert f"{type(cause).__name__}: {cause}" == caught.value.found


def test_unknown_argument_of_the_forward() -> None:
    with pytest.raises(InputError, match="unexpected keyword argument 'pixels'") as caught:
        normprobe.probe(decoder("pre", layers=1)[0], {"pixels": ids()})
    assert isinstance(caught.value.__cause__, TypeError)


# ---- settings


def test_unknown_level() -> None:
    with pytest.raises(SettingError, match=r"unknown level 'deep'\n  expected: structure \| forward \| backward"):
        normprobe.probe(*gpt2(), level="deep")


def test_unknown_measure() -> None:
    with pytest.raises(SettingError, match="unknown measure 'astrology'"):
        normprobe.probe(*gpt2(), measures=("astrology",))


@pytest.mark.parametrize("dtype", ["float3", "int8", torch.int64])
def test_unknown_autocast(dtype: Any) -> None:
    with pytest.raises(SettingError, match="unknown autocast dtype"):
        normprobe.probe(*gpt2(), autocast=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_autocast_is_in_force(dtype: Any) -> None:
    model, inputs = decoder("pre", layers=1)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    normprobe.probe(model, inputs, autocast=dtype)
    assert set(seen) == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


# ---- levels


def test_levels_hold_more_and_more() -> None:
    model, inputs = gpt2()
    structure, forward, backward = (
        normprobe.probe(model, inputs, level=level) for level in ("structure", "forward", "backward")
    )
    assert structure.anatomy == forward.anatomy == backward.anatomy
    assert (structure.residual, structure.attention, structure.gradients) == ((), (), None)
    assert len(forward.residual[0].states) == 2 * LAYERS
    assert [len(site.heads) for site in forward.attention] == [HEADS] * LAYERS
    assert forward.gradients is None
    assert backward.residual == forward.residual
    assert backward.gradients is not None
    assert [b.kind for b in backward.gradients.branches] == ["attention", "mlp"] * LAYERS


def test_measured_stream_is_the_streams_own() -> None:
    """RMS after the last write against a forward in float64."""
    model, inputs = decoder("pre", layers=1)
    seen: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    report = normprobe.probe(model, inputs)
    rms = seen[-1].double().square().mean(-1).sqrt().flatten()
    assert report.residual[0].states[-1].rms_max == pytest.approx(rms.max().item(), rel=1e-5)
    assert report.residual[0].states[-1].rms_argmax == int(rms.argmax())


def test_loss_of_the_caller() -> None:
    model, inputs = decoder("pre", layers=1)
    seen: list[Any] = []

    def loss(output: Tensor, given: Any) -> Tensor:
        seen.append(given)
        return output.square().mean() * 3

    gradients = normprobe.probe(model, inputs, level="backward", loss=loss).gradients
    expected = model(inputs).square().mean() * 3
    branch = gradients.branches[-1]
    names = [
        f"blocks.0.think.{n}" for n in ("branch.up.weight", "branch.up.bias", "branch.down.weight", "branch.down.bias")
    ]
    names += ["blocks.0.think.norm.weight", "blocks.0.think.norm.bias"]
    grads = torch.autograd.grad(expected, [model.get_parameter(n) for n in names])
    total = torch.stack([g.double().norm() for g in grads]).norm().item()
    assert gradients.value == pytest.approx(expected.item(), rel=1e-5)
    assert branch.parameter_norm == pytest.approx(total, rel=1e-4)
    assert torch.equal(seen[0], inputs)


def test_progress_is_told() -> None:
    told: list[str] = []
    normprobe.probe(*gpt2(), level="backward", progress=lambda stage, done, total: told.append(stage))
    assert list(dict.fromkeys(told)) == ["record", "identify", "measure", "gradients"]


# ---- findings


def test_nan_is_a_finding() -> None:
    model, inputs = decoder("pre", layers=2)
    with torch.no_grad():
        model.blocks[1].think.branch.down.weight[0, 0] = float("nan")
    report = normprobe.probe(model, inputs, level="backward")
    (finding,) = [f for f in report.findings if f.code == "NP504"]
    assert finding.where == "blocks.1.think.branch.down.weight"
    assert report.data.measurements.output_finite is False


def test_report_with_nan_is_strict_json(tmp_path: Path) -> None:
    model, inputs = decoder("pre", layers=2)
    with torch.no_grad():
        model.blocks[1].think.branch.down.weight[0, 0] = float("nan")
    report = normprobe.probe(model, inputs, level="backward")
    path = tmp_path / "report.json"
    report.save(path)

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(path.read_text(encoding="utf-8"), parse_constant=refused)
    assert repr(Report.load(path).data) == repr(report.data)


def test_finite_model_has_no_such_finding() -> None:
    assert "NP504" not in {f.code for f in normprobe.probe(*decoder("pre", layers=2)).findings}


def test_norm_with_nan_weights_is_still_read() -> None:
    model, inputs = decoder("pre", layers=1)
    with torch.no_grad():
        model.final.weight[3] = float("nan")
    report = normprobe.probe(model, inputs)
    assert report.anatomy.streams[0].final_norm == "final"
    assert report.anatomy.norm("final").kind == "layernorm"
    assert "NP504" in {f.code for f in report.findings}


def test_model_on_meta_is_read_and_not_measured() -> None:
    with torch.device("meta"):
        built = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, norm_first=True)
    report = normprobe.probe(built, torch.randn(2, TOKENS, WIDTH), level="backward")
    assert [b.placement for b in report.anatomy.streams[0].branches] == ["pre", "pre"]
    assert (report.residual, report.gradients) == ((), None)
    assert [s.why for s in report.skipped if s.what == "measurements"] == ["the model holds no weights (meta device)"]


# ---- the report


def test_report_goes_through_json_whole(tmp_path: Path) -> None:
    report = normprobe.probe(*gpt2(), level="backward")
    path = tmp_path / "report.json"
    report.save(path)
    assert Report.load(path).data == report.data
    assert Report.load(path).to_dict() == report.to_dict()


def test_report_says_what_was_probed() -> None:
    model, inputs = gpt2()
    target = normprobe.probe(model, inputs, level="structure").to_dict()["target"]
    assert (target["class"], target["dtype"], target["device"]) == ("GPT2LMHeadModel", "float32", "cpu")
    assert target["parameters"] == sum(p.numel() for p in model.parameters())


def test_model_without_parameters_and_without_stream() -> None:
    report = normprobe.probe(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2, 3))
    assert report.anatomy.streams == ()
    assert report.findings == ()


def test_inputs_are_not_changed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layer_norm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x * 2)

    x = torch.randn(2, TOKENS, WIDTH)
    before = x.clone()
    normprobe.probe(shuffled(Writes()), x)
    assert torch.equal(x, before)
    assert not x.requires_grad
