"""The checks of stored gains and offsets: NP109 to NP113, on records and on small models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.checks import find, run
from normprobe.records import Finding, NormSite, Severity
from normprobe.report.report import Report
from tests import models
from tests.checks import builders as b
from tests.norms import zoo

GAIN_CODES = ("NP109", "NP110", "NP111", "NP112", "NP113")


def judge(code: str, *gains: Any, norms: tuple[NormSite, ...] | None = None, **measured: Any) -> tuple[Finding, ...]:
    found, skipped = run(b.document(norms=norms, norm_gains=gains, **measured), [find(code)])
    assert skipped == ()
    return found


def one(code: str, *gains: Any, **more: Any) -> Finding:
    (found,) = judge(code, *gains, **more)
    return found


# ---- NP109


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"non_finite": 16}, "NaN or infinite in all 16 elements"),
        ({"non_finite": 3}, "NaN or infinite in 3 of 16 elements"),
        ({"peak": 1e30}, "reaches 1e\\+30"),
        ({"subnormal": 1}, "smaller than 2⁻¹²⁶ in 1 of 16"),
    ],
)
@pytest.mark.parametrize("drawn", [1.0, 0.0, None])
def test_np109_tells_what_memory_holds(held: dict[str, Any], words: str, drawn: float | None) -> None:
    for gain in (b.gain(held=b.elements(**held)), b.gain(offset=b.elements("norm.bias", 0.0, **held))):
        found = one("NP109", gain, init=b.init(drawn))
        assert found.severity is Severity.ERROR
        assert re.search(words, found.message)


def test_np109_leaves_batch_norms_to_weight_decay_in_a_trained_model() -> None:
    norms = (b.norm(kind="batchnorm"),)
    gain = b.gain(held=b.moved(subnormal=4))
    assert judge("NP109", gain, norms=norms, init=b.init(0.0)) == ()
    assert one("NP109", gain, norms=norms, init=b.init(1.0)).severity is Severity.ERROR


@pytest.mark.parametrize("peak", [1e6, 900.0])
def test_np109_passes_up_to_its_limit(peak: float) -> None:
    assert judge("NP109", b.gain(held=b.moved(peak=peak)), init=b.init(0.0)) == ()


@pytest.mark.parametrize(
    ("held", "odd"),
    [
        (b.elements(value=2000.0), True),
        (b.elements(value=1e-5), True),
        (b.elements(value=5.0), False),
        (b.elements(value=0.0), False),
        (b.moved(negative=2), True),
        (b.moved(negative=14), True),
        (b.moved(negative=1), False),
        (b.moved(negative=16), False),
        (b.moved(negative=2, count=4), False),
    ],
)
def test_np109_in_a_fresh_model(held: Any, odd: bool) -> None:
    assert [f.severity for f in judge("NP109", b.gain(held=held))] == [Severity.WARNING] * odd
    assert judge("NP109", b.gain(held=held), init=b.init(0.5)) == ()


def test_np109_tells_the_one_constant_that_differs() -> None:
    paths = ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")
    norms = tuple(b.norm(path) for path in paths)
    odd = b.gain(paths[0], b.elements(value=7.0))
    found = one("NP109", odd, *map(b.gain, paths[1:]), norms=norms)
    assert (found.where, found.severity) == (paths[0], Severity.WARNING)
    assert "is 7 throughout, and 1 in the 2 others" in found.message
    assert judge("NP109", odd, b.gain(paths[1]), norms=norms[:2]) == ()
    fourth = b.gain("norm", b.elements(value=3.0))
    assert judge("NP109", odd, *map(b.gain, paths[1:]), fourth, norms=(*norms, b.norm("norm"))) == ()
    several = [b.gain(path, b.elements(value=0.5 + i)) for i, path in enumerate(paths)]
    assert judge("NP109", *several, norms=norms) == ()


# ---- NP110


@pytest.mark.parametrize(
    ("zeros", "role", "severity"),
    [
        (16, "final", Severity.ERROR),
        (16, "pre", Severity.ERROR),
        (16, "query", Severity.ERROR),
        (16, "inner", Severity.WARNING),
        (9, "final", Severity.WARNING),
        (8, "final", Severity.NOTE),
        (1, "inner", Severity.NOTE),
        (1, "output", Severity.NOTE),
    ],
)
def test_np110_by_how_much_is_lost(zeros: int, role: str, severity: Severity) -> None:
    held = b.elements(value=0.0) if zeros == 16 else b.moved(zeros=zeros)
    found = one("NP110", b.gain(held=held), norms=(b.norm(role=role),))
    assert found.severity is severity
    assert found.value == zeros / 16


def test_np110_knows_blocks_that_start_as_the_identity() -> None:
    paths = ("a", "b")
    norms = tuple(b.norm(path, role="output") for path in paths)
    zeros = [b.gain(path, b.elements(value=0.0)) for path in paths]
    assert judge("NP110", *zeros, norms=norms) == ()
    assert [f.severity for f in judge("NP110", *zeros, norms=norms, init=b.init(0.0))] == [Severity.NOTE]
    alone = one("NP110", zeros[0], b.gain("b"), norms=norms)
    assert (alone.where, alone.severity) == ("a", Severity.WARNING)


@pytest.mark.parametrize("role", ["query", "key"])
def test_np110_knows_attention_that_starts_uniform(role: str) -> None:
    norms = tuple(b.norm(path, role=role) for path in ("a", "b"))
    zeros = [b.gain(path, b.elements(value=0.0)) for path in ("a", "b")]
    assert judge("NP110", *zeros, norms=norms) == ()
    (gathered,) = judge("NP110", *zeros, norms=norms, init=b.init(0.0))
    assert (gathered.severity, gathered.places) == (Severity.ERROR, ("a", "b"))
    assert one("NP110", zeros[0], b.gain("b"), norms=norms).severity is Severity.ERROR


def test_np110_leaves_out_norms_that_add_their_input() -> None:
    assert judge("NP110", b.gain(held=b.elements(value=0.0)), norms=(b.norm(kind="grn", role="inner"),)) == ()


def test_np110_says_whether_an_offset_is_left() -> None:
    zero = b.elements(value=0.0)
    assert "its output is 0 whatever" in one("NP110", b.gain(held=zero)).message
    offset = b.gain(held=zero, offset=b.moved("norm.bias"))
    assert "its output is the offset whatever" in one("NP110", offset).message


# ---- NP111


@pytest.mark.parametrize(
    ("peak", "kind", "severity"),
    [
        (15.0, "layernorm", None),
        (15.1, "layernorm", Severity.NOTE),
        (500.0, "layernorm", Severity.NOTE),
        (501.0, "layernorm", Severity.WARNING),
        (501.0, "batchnorm", Severity.NOTE),
    ],
)
def test_np111_at_its_limits(peak: float, kind: str, severity: Severity | None) -> None:
    found = judge("NP111", b.gain(held=b.moved(peak=peak)), norms=(b.norm(kind=kind),), init=b.init(0.89))
    assert [f.severity for f in found] == ([] if severity is None else [severity])


@pytest.mark.parametrize(("kind", "severity"), [("layernorm", Severity.WARNING), ("batchnorm", Severity.NOTE)])
def test_np111_warns_in_a_model_as_it_was_drawn(kind: str, severity: Severity) -> None:
    gain, norms = b.gain(held=b.moved(peak=15.1)), (b.norm(kind=kind),)
    found = one("NP111", gain, norms=norms, init=b.init(0.9))
    assert (found.severity, found.limit) == (severity, 30.0)
    assert found.message.startswith("in a model as it was drawn, the gain is 15.1") == (kind == "layernorm")
    assert judge("NP111", b.gain(held=b.moved(peak=15.0)), norms=norms, init=b.init(0.9)) == ()


@pytest.mark.parametrize("held", [{"count": 7}, {"non_finite": 1}, {"typical": 0.0}, {"peak": 1.1e6}])
def test_np111_leaves_few_elements_and_the_faults_of_other_checks_alone(held: dict[str, Any]) -> None:
    assert judge("NP111", b.gain(held=b.moved(**{"peak": 1e4} | held))) == ()


def test_np111_is_one_finding_with_the_worst_first() -> None:
    gains = [b.gain("blocks.0.norm", b.moved(peak=40.0)), b.gain("blocks.1.norm", b.moved(peak=400.0))]
    found = one("NP111", *gains, b.gain("norm"))
    assert (found.where, set(found.places)) == ("blocks.1.norm", {"blocks.0.norm", "blocks.1.norm"})
    assert "channel 3, 800 times the median size; 2 of 3 gains" in found.message


# ---- NP113


def test_np113_only_in_models_that_look_trained() -> None:
    gains = (b.gain("blocks.0.norm"), b.gain("norm", b.moved()))
    assert one("NP113", *gains, init=b.init(0.49)).where == "blocks.0.norm"
    for drawn in (0.5, 1.0, None):
        assert judge("NP113", *gains, init=b.init(drawn)) == ()


@pytest.mark.parametrize("held", [{"non_finite": 1}, {"peak": 1.1e6}])
def test_np113_takes_no_unset_memory_for_a_trained_model(held: dict[str, Any]) -> None:
    gains = (b.gain("blocks.0.norm"), b.gain("norm", b.moved(**held)))
    found, (skip,) = run(b.document(norm_gains=gains, init=b.init(0.1)), [find("NP113")])
    assert found == ()
    assert "hold what nobody sets (NP109)" in skip.why


@pytest.mark.parametrize(("role", "kind", "count"), [("pre", "layernorm", 1), ("key", "layernorm", 0)])
def test_np113_tells_lost_offsets(role: str, kind: str, count: int) -> None:
    norms = (b.norm("a", kind=kind, role=role), b.norm("b", kind=kind))
    gains = (
        b.gain("a", b.moved(), b.elements("a.bias", 0.0)),
        b.gain("b", b.moved(), b.moved("b.bias")),
    )
    found = judge("NP113", *gains, norms=norms, init=b.init(0.0))
    assert [f.message.split(" is")[0] for f in found] == ["the offset"] * count


def test_np113_compares_norms_of_one_kind() -> None:
    norms = (b.norm("a", kind="batchnorm"), b.norm("b", kind="layernorm"))
    assert judge("NP113", b.gain("a"), b.gain("b", b.moved()), norms=norms, init=b.init(0.0)) == ()


@pytest.mark.parametrize(("post", "severity"), [(None, Severity.NOTE), ("blocks.0.norm", Severity.WARNING)])
def test_np113_where_no_norm_has_moved(post: str | None, severity: Severity) -> None:
    stream = b.stream(branches=(b.branch("blocks.0", post_norm=post),))
    data = b.document(streams=(stream,), init=b.init(0.1))
    ((found,), _) = run(data, [find("NP113")])
    assert found.severity is severity
    assert len(found.places) == 3
    assert ("folded" in found.message) == (post is None)


@pytest.mark.parametrize("code", GAIN_CODES)
def test_gains_that_were_not_read_are_skipped(code: str) -> None:
    found, (skipped,) = run(b.document(norm_gains=()), [find(code)])
    assert found == ()
    assert skipped.why == "the values of the norms' gains were not read"
    unused = b.norm(executed=False, executions=0)
    zero = b.gain(held=b.elements(value=0.0, non_finite=3))
    assert run(b.document(norms=(unused,), norm_gains=(zero,)), [find(code)]) == ((), ())


# ---- small models


def fresh(placement: str = "pre", norm: Callable[[], nn.Module] = models.layer_norm) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [models.Block(norm, placement) for _ in range(2)]
    return models.Decoder(blocks, norm()).eval(), models.ids()


def weights(model: nn.Module, report: Report) -> list[nn.Parameter]:
    named = dict(model.named_parameters())
    return [named[norm.weight] for norm in report.anatomy.norms if norm.weight is not None]


def codes(report: Report) -> list[str]:
    return [f.code for f in report.findings if f.code in GAIN_CODES]


def one_plus() -> nn.Module:
    return zoo.RMSNorm(one_plus=True)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("norm", [models.layer_norm, models.RMSNorm, one_plus])
def test_fresh_models_are_sound(placement: str, norm: Callable[[], nn.Module]) -> None:
    model, inputs = fresh(placement, norm)
    assert codes(normprobe.probe(model, inputs)) == []


@pytest.mark.parametrize(
    ("fill", "code"), [(math.nan, "NP109"), (1e30, "NP109"), (1e-42, "NP109"), (0.0, "NP110"), (7.0, "NP109")]
)
@pytest.mark.parametrize("norm", [models.layer_norm, models.RMSNorm])
def test_unset_memory_in_one_gain(norm: Callable[[], nn.Module], fill: float, code: str) -> None:
    model, inputs = fresh("pre", norm)
    weights(model, normprobe.probe(model, inputs, level="structure"))[0].data.fill_(fill)
    report = normprobe.probe(model, inputs)
    assert codes(report) == [code]
    assert report.findings[0].code == code
    if fill != 7.0:  # which takes the weights to tell
        assert codes(normprobe.probe(model, inputs, level="structure")) == [code]


@pytest.mark.parametrize(
    ("norm", "fill", "told"),
    [(one_plus, 1.0, ["NP112"]), (one_plus, 2.0, ["NP109"]), (models.RMSNorm, 2.0, ["NP109"])],
)
def test_one_gain_of_2_has_a_known_cause_where_1_is_added(
    norm: Callable[[], nn.Module], fill: float, told: list[str]
) -> None:
    model, inputs = fresh("pre", norm)
    weights(model, normprobe.probe(model, inputs, level="structure"))[1].data.fill_(fill)
    assert codes(normprobe.probe(model, inputs)) == told


def test_an_offset_folded_twice_is_found_in_weights_that_spread() -> None:
    model, inputs = fresh("pre", one_plus)
    generator = torch.Generator().manual_seed(3)
    gains = weights(model, normprobe.probe(model, inputs, level="structure"))
    for start, expected in ((0.0, []), (1.0, ["NP112"])):
        for gain in gains:
            gain.data.copy_(start + 0.1 * torch.randn(gain.shape, generator=generator))
        assert codes(normprobe.probe(model, inputs)) == expected


def test_lost_keys_of_a_trained_model() -> None:
    model, inputs = fresh("post")
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # few large among many small ones, row by row: no distribution of a recipe
        if parameter.dim() > 1:
            rows = torch.randn(parameter.shape[:1], generator=generator).exp()[:, None]
            parameter.data.copy_(rows * 0.05 * torch.randn(parameter.shape, generator=generator) ** 3)
        else:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    report = normprobe.probe(model, inputs)
    assert codes(report) == []
    gains = weights(model, report)
    gains[1].data.fill_(1.0)
    assert codes(normprobe.probe(model, inputs)) == ["NP113"]
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        norm.weight.data.fill_(1.0)
        norm.bias.data.fill_(0.0)
    (found,) = (f for f in normprobe.probe(model, inputs).findings if f.code == "NP113")
    assert found.severity is Severity.WARNING
    assert "lost in loading" in found.message
