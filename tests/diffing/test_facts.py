"""Each fact of the build that two models do not share is told, at its places and with its severity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.diffing.inputs import refuse_unlike
from normprobe.errors import InputError
from normprobe.records import Severity
from normprobe.report.diffs.report import DiffReport
from tests.diffing.models import RMS, Decoder, decoder, tokens, twin


def told(report: DiffReport) -> dict[str, tuple[str, Any, Any]]:
    """Severity and both values by what differs."""
    return {f"{d.subject} {d.fact}": (d.severity.value, d.a, d.b) for d in report.differences}


def loaded(**options: Any) -> Decoder:
    """A decoder with other options and the weights of the plain one."""
    model = decoder(**options)
    model.load_state_dict(decoder().state_dict())
    return model


def test_a_copy_is_the_same_bit_for_bit() -> None:
    report = normprobe.diff(decoder(), decoder(), tokens())
    assert report.verdict == "same"
    assert report.differences == ()
    assert report.skipped == ()
    assert {pair.relation for pair in report.weights} == {"equal"}
    assert report.output is not None
    assert (report.output.max_abs, report.output.kl, report.output.agreement) == (0.0, 0.0, 1.0)
    counts = [
        sum(match.subject == subject for match in report.data.matched) for subject in ("branch", "norm", "attention")
    ]
    assert counts == [6, 7, 3]


def test_eps_of_one_layer() -> None:
    other = decoder()
    other.blocks[1].second.eps = 1e-3
    report = normprobe.diff(decoder(), other, tokens())
    found = next(d for d in report.differences if d.fact == "eps")
    assert (found.subject, found.severity) == ("norm", Severity.ERROR)
    assert (found.a, found.b) == (pytest.approx(1e-6, rel=1e-3), pytest.approx(1e-3, rel=1e-3))
    assert found.where == (("blocks.1.second", "blocks.1.second"),)


def test_a_gain_that_adds_one_to_the_same_weight() -> None:
    report = normprobe.diff(decoder(), loaded(norm={"plus_one": True}), tokens())
    assert told(report)["norm affine"] == ("error", "weight", "one_plus_weight")
    assert "the stored weight is the same, and one of them adds 1 to it" in report.differences[0].message
    assert len(report.differences[0].where) == 7


def test_a_folded_one_is_a_note() -> None:
    other = loaded(norm={"plus_one": True})
    with torch.no_grad():
        for norm in other.modules():
            if isinstance(norm, RMS):
                norm.weight -= 1
    report = normprobe.diff(decoder(), other, tokens())
    assert told(report) == {"norm affine": ("note", "weight", "one_plus_weight")}
    assert report.verdict == "same"
    assert not report.failed()
    assert report.failed("note")


def test_where_the_gain_is_multiplied() -> None:
    report = normprobe.diff(decoder(), loaded(norm={"late_gain": True}), tokens())
    assert told(report) == {"norm weight_multiply": ("warning", "before_cast", "after_cast")}
    assert report.verdict == "differs"
    assert not report.failed("error")


@pytest.mark.parametrize(
    ("options", "fact", "values"),
    [({"softcap": 20.0}, "softcap", (None, 20.0)), ({"scale": 1.0}, "scale", (3 / 8**0.5, 3.0))],
)
def test_attention_facts(options: dict[str, Any], fact: str, values: tuple[Any, Any]) -> None:
    report = normprobe.diff(decoder(), loaded(attention=options), tokens())
    severity, a, b = told(report)[f"attention {fact}"]
    assert severity == "error"
    assert (a, b) == (values[0] and pytest.approx(values[0], rel=1e-3), pytest.approx(values[1], rel=1e-3))
    back = normprobe.diff(loaded(attention=options), decoder(), tokens())
    assert told(back)[f"attention {fact}"][1:] == (b, a)


def test_a_scale_that_is_folded_into_a_weight_is_a_note() -> None:
    other = loaded(attention={"scale": 2.0})
    with torch.no_grad():
        for block in other.blocks:
            block.attention.q.weight *= (32 // 4) ** -0.5 / 2
    report = normprobe.diff(decoder(), other, tokens())
    assert told(report)["attention scale"][0] == "note"
    assert report.verdict == "same"
    assert "the outputs are the same up to rounding" in report.differences[0].message


def test_eps_stays_an_error_where_these_inputs_do_not_show_it() -> None:
    other = decoder()
    other.blocks[1].second.eps = 1e-9
    report = normprobe.diff(decoder(), other, tokens())
    assert report.signal is not None
    assert report.signal.sites[-1].step is False
    assert told(report).keys() == {"norm eps"}
    assert report.verdict == "differs"


def test_qk_norm_of_one_model_is_said_once() -> None:
    normed = decoder(attention={"qk_norm": True})
    plain = decoder()
    plain.load_state_dict({name: v for name, v in normed.state_dict().items() if "norms" not in name})
    found = told(normprobe.diff(normed, plain, tokens()))
    assert found.pop("attention qk_norm") == ("error", "rmsnorm", None)
    assert found.keys() == {"signal parting", "output values"}


def test_eps_of_a_query_norm() -> None:
    other = decoder(attention={"qk_norm": True})
    norms: Any = other.blocks[1].attention.norms
    norms[0].eps = 1e-2
    report = normprobe.diff(decoder(attention={"qk_norm": True}), other, tokens())
    assert next((d.fact, d.where) for d in report.differences) == (
        "eps",
        (("blocks.1.attention.norms.0", "blocks.1.attention.norms.0"),),
    )


def test_another_activation() -> None:
    other = decoder()
    other.blocks[2].function = torch.relu
    found = normprobe.diff(decoder(), other, tokens()).differences[0]
    assert (found.fact, found.a, found.b) == ("activation", "gelu", "relu")
    assert found.where == (("blocks.2.up.weight", "blocks.2.up.weight"),)


def test_another_activation_in_layers_in_a_row() -> None:
    def row(function: nn.Module) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), function, nn.Linear(16, 4)).eval()

    found = normprobe.diff(row(nn.ReLU()), row(nn.GELU()), torch.randn(4, 8)).differences[0]
    assert (found.subject, found.fact, found.a, found.b) == ("weights", "activation", "relu", "gelu")
    assert found.where == (("2.weight", "2.weight"),)


def test_models_of_other_inputs_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    ids = LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **small))
    images = ViTModel(ViTConfig(image_size=16, patch_size=8, **small))
    with pytest.raises(InputError, match=r"(?s)different inputs.*A: input_ids; B: pixel_values"):
        normprobe.diff(ids, images)
    refuse_unlike({"ids": tokens()}, {"words": tokens()})
    refuse_unlike({"ids": tokens(), "x": torch.ones(2)}, {"x": torch.ones(2)})
    refuse_unlike({"ids": tokens()}, None)


def test_one_gain_of_other_values() -> None:
    other = decoder()
    with torch.no_grad():
        other.norm.weight[3] *= 1.5
    report = normprobe.diff(decoder(), other, tokens())
    found = next(d for d in report.differences if d.fact == "gain")
    assert (found.severity, found.where) == (Severity.ERROR, (("norm", "norm"),))


def test_a_gain_rounded_to_half_precision_is_a_warning() -> None:
    other = decoder()
    with torch.no_grad():
        other.norm.weight.copy_(other.norm.weight.bfloat16().float())
    found = next(d for d in normprobe.diff(decoder(), other, tokens()).differences if d.fact == "gain")
    assert found.severity is Severity.WARNING


def test_a_missing_final_norm() -> None:
    other = decoder()
    other.norm = nn.Identity()
    report = normprobe.diff(decoder(), other, tokens())
    assert told(report)["norm final_norm"] == ("error", "there", None)
    assert told(normprobe.diff(other, decoder(), tokens()))["norm final_norm"] == ("error", None, "there")


def test_another_kind_of_norm() -> None:
    other = decoder()
    other.blocks[0].first = nn.LayerNorm(32, eps=1e-6)
    report = normprobe.diff(decoder(), other, tokens())
    assert told(report)["norm kind"] == ("error", "rmsnorm", "layernorm")


class PostNorm(nn.Module):
    """The block's parts in post-norm order."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.inner
        x = inner.first(x + inner.attention(x))
        return inner.second(x + inner.down(torch.nn.functional.gelu(inner.up(x))))


def test_another_placement() -> None:
    other = decoder()
    other.blocks = nn.ModuleList(PostNorm(block) for block in other.blocks)
    report = normprobe.diff(decoder(), other, tokens())
    assert told(report)["branch placement"] == ("error", "pre", "post")
    assert told(report)["stream placement"] == ("error", "pre", "post")


def test_structure_alone_runs_no_model_for_values() -> None:
    other = twin(decoder())
    with torch.no_grad():
        other.head.weight += 1
    report = normprobe.diff(decoder(), other, tokens(), level="structure")
    assert report.verdict == "same"
    assert (report.signal, report.output, report.weights) == (None, None, ())
    assert report.data.level == "structure"


def test_models_without_values_say_so() -> None:
    report = normprobe.diff(decoder().to("meta"), decoder().to("meta"), tokens())
    assert (report.verdict, report.complete) == ("unknown", False)
    assert [s.why for s in report.skipped if s.what == "weights, signals and outputs"] == [
        'a model holds no weights (meta device); level "structure" compares the build alone'
    ]
    report = normprobe.diff(decoder().to("meta"), decoder().to("meta"), tokens(), level="structure")
    assert (report.verdict, report.complete, report.skipped) == ("same", True, ())
