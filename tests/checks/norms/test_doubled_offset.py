"""NP112: 1 added twice or never, on records and on a model that starts so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normprobe
from normprobe.checks import find, run
from normprobe.records import Elements, Finding, NormSite
from tests.checks import builders as b
from tests.faults.operators.gains import look_trained
from tests.models import gpt2


def judge(*gains: Any, norms: tuple[NormSite, ...] | None = None, drawn: float = 0.2) -> tuple[Finding, ...]:
    found, skipped = run(b.document(norms=norms, norm_gains=gains, init=b.init(drawn=drawn)), [find("NP112")])
    assert skipped == ()
    return found


@pytest.mark.parametrize(
    ("median", "below", "found"), [(2.0, 0, 1), (1.5, 0, 1), (1.4, 0, 0), (2.0, 1, 0), (1.0, 8, 0)]
)
def test_np112_for_all_norms(median: float, below: int, found: int) -> None:
    held = b.moved(median=median, stored_negative=below)
    gains = [b.gain(path, held, one_plus=True) for path in ("blocks.0.norm", "blocks.1.norm", "norm")]
    assert len(judge(*gains)) == found
    assert judge(*(g.model_copy(update={"one_plus": False}) for g in gains)) == ()


@pytest.mark.parametrize(
    ("held", "start", "severities"),
    [
        (b.moved(median=2.2), None, ["warning"]),
        (b.moved(median=2.3), None, ["note"]),  # as may be trained to: no claim
        (b.elements(value=3.0), None, ["warning"]),
        (b.elements(value=3.0), 2.0, ["warning"]),
        (b.elements(value=2.0), 2.0, []),  # so the class starts
        (b.moved(median=2.0), 2.0, ["warning"]),
    ],
)
def test_np112_is_as_sure_as_the_values(held: Elements, start: float | None, severities: list[str]) -> None:
    gains = [
        b.gain(path, held, one_plus=True).model_copy(update={"start": start}) for path in ("blocks.0.norm", "norm")
    ]
    assert [f.severity.value for f in judge(*gains)] == severities


@pytest.mark.parametrize(("below", "zeros", "found"), [(8, 0, 1), (14, 0, 1), (1, 0, 0), (15, 0, 0), (8, 8, 0)])
def test_np112_for_a_1_that_was_never_added(below: int, zeros: int, found: int) -> None:
    """The rarer of the two signs decides, and all norms together."""
    held = b.elements(value=0.0, negative=below, stored_negative=below, typical=0.04, peak=0.2, zeros=zeros)
    gains = [b.gain(path, held) for path in ("blocks.0.norm", "norm")]
    norms = tuple(map(b.norm, ("blocks.0.norm", "norm")))
    assert [f.places for f in judge(*gains, norms=norms)] == [("blocks.0.norm", "norm")] * found
    few = [gains[0], *(b.gain(f"more.{i}", b.moved()) for i in range(9))]
    wide = (norms[0], *(b.norm(f"more.{i}") for i in range(9)))
    assert judge(*few, norms=wide) == ()
    for other in ({"kind": "batchnorm"}, {"role": "inner"}, {"affine": "other"}, {"role": "query"}):
        assert judge(*gains, norms=tuple(n.model_copy(update=other) for n in norms)) == ()
    assert judge(*gains, norms=norms, drawn=1.0) == ()  # NP109's


def test_np112_for_the_one_that_stands_out() -> None:
    paths = [f"blocks.{i}.norm" for i in range(3)]
    norms = tuple(map(b.norm, paths))
    about_one = [b.gain(path, b.moved(median=1.1, stored_negative=5), one_plus=True) for path in paths]
    for median, count in ((1.8, 1), (1.7, 0), (2.3, 0)):
        odd = b.gain(paths[0], b.moved(median=median), one_plus=True)
        found = judge(odd, *about_one[1:], norms=norms)
        assert [f.where for f in found] == paths[:count]
    assert judge(*about_one, norms=norms) == ()
    few = [b.gain(paths[0], b.moved(median=2.0), one_plus=True), about_one[1]]
    assert judge(*few, norms=norms[:2]) == ()


def nemotron() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.NemotronConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    return transformers.NemotronForCausalLM(config).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["structure", "forward"])
def test_np112_passes_what_the_class_starts_with(level: Any) -> None:
    """Nemotron's w starts at 1, and 1 + w is applied."""
    model, inputs = nemotron(), torch.randint(3, 64, (1, 16))
    report = normprobe.probe(model, inputs, level=level)
    assert {(g.start, g.gain.constant) for g in report.measurements.norm_gains if g.gain} == {(2.0, 2.0)}
    assert [f for f in report.findings if f.code == "NP112"] == []
    for norm in report.anatomy.norms:
        model.get_parameter(norm.weight or "").data.add_(1.0)
    (found,) = [f for f in normprobe.probe(model, inputs, level=level).findings if f.code == "NP112"]
    assert (found.severity.value, found.value, len(found.places)) == ("warning", 3.0, 5)


def test_np112_tells_weights_of_1_plus_w_in_norms_that_apply_w() -> None:
    model, inputs = gpt2()
    anatomy = normprobe.probe(model, inputs, level="structure").anatomy
    look_trained(model, anatomy, inputs)
    for shift, expected in ((0.0, []), (-1.0, ["NP112"])):
        for norm in anatomy.norms:
            model.get_parameter(norm.weight or "").data.add_(shift)
        report = normprobe.probe(model, inputs)
        assert [f.code for f in report.findings if f.code[:4] == "NP11" and f.severity.value != "note"] == expected
    assert len(report.findings[0].places) == 5
