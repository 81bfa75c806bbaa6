"""The checks of eps beside the signal and between norms: NP103 and NP105; and NP107, of the cast before the gain."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.checks import find, run
from normprobe.records import Finding, NormSite, ReportData, Severity, Skipped
from normprobe.report.report import Report
from tests import models
from tests.checks import builders as b
from tests.norms import zoo


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


# ---- NP103


def signal(entry: float, *states: float, norms: tuple[NormSite, ...] | None = None, **more: Any) -> list[Finding]:
    rows = tuple(b.state(index, rms=rms) for index, rms in enumerate(states))
    found, skipped = judge("NP103", b.document(norms=norms, residual=(b.residual(*rows, entry_rms=entry),), **more))
    assert skipped == ()
    return list(found)


@pytest.mark.parametrize(
    ("placement", "entry", "eps", "severity", "share", "left"),
    [
        ("inside_sqrt", 1e-2, 4.9e-6, None, 0.049, ""),
        ("inside_sqrt", 1e-2, 6e-6, Severity.NOTE, 0.06, "0.9713"),
        ("inside_sqrt", 1e-2, 1e-4, Severity.WARNING, 1.0, "0.7071"),
        ("inside_sqrt", math.sqrt(4e-6), 1e-5, Severity.WARNING, 2.5, "0.5345"),
        ("outside_sqrt", 1e-2, 4.9e-4, None, 0.049, ""),
        ("outside_sqrt", 1e-2, 1e-2, Severity.WARNING, 1.0, "0.5"),
        ("clamp", 1e-2, 2e-2, Severity.WARNING, 2.0, "0.5"),
        ("clamp", 1e-2, 1e-3, Severity.NOTE, 0.1, "1 of its scale"),
        ("scaled", 1e-2, 1.0, None, 0.0, ""),
        ("none", 1e-2, None, None, 0.0, ""),
    ],
)
def test_np103_against_the_closed_form(
    placement: str, entry: float, eps: float | None, severity: Severity | None, share: float, left: str
) -> None:
    first = b.norm(eps=eps, eps_placement=placement)
    found = signal(entry, 1.0, 1.0, norms=(first, b.norm("blocks.1.norm"), b.norm("norm")))
    assert [f.severity for f in found] == ([] if severity is None else [severity])
    for one in found:
        assert (one.where, one.value) == ("blocks.0.norm", pytest.approx(share))
        assert f"the output has {left}" in one.message
        assert "1 of 3 norms" in one.message


@pytest.mark.parametrize(
    "facts",
    [{"kind": "l2norm"}, {"kind": "batchnorm"}, {"axes": (-2, -1)}, {"eps": None}, {"eps_placement": "unknown"}],
)
def test_np103_judges_layer_and_rms_norms_of_known_eps(facts: dict[str, Any]) -> None:
    assert signal(1e-3, 1.0, 1.0, norms=(b.norm(**facts), b.norm("norm"))) == []


@pytest.mark.parametrize("rms", [0.0, math.nan, math.inf])
def test_np103_leaves_no_signal_to_other_checks(rms: float) -> None:
    assert signal(rms, 1.0, 1.0) == []


def test_np103_reads_the_stream_where_each_norm_stands() -> None:
    assert [f.where for f in signal(1.0, 1e-3, 1.0)] == ["blocks.1.norm"]
    assert [f.where for f in signal(1.0, 1.0, 1e-3)] == ["norm"]
    behind = b.stream(branches=(b.branch("blocks.0", pre_norm=None, post_norm="norm"),), final_norm=None)
    assert [f.where for f in signal(1e-3, 1.0, streams=(behind,))] == []
    assert [f.where for f in signal(1.0, 1e-3, streams=(behind,))] == ["norm"]


def test_np103_takes_what_parallel_branches_read() -> None:
    pair = tuple(b.branch(f"blocks.{i}", block="blocks.0", parallel=True) for i in range(2))
    assert [f.where for f in signal(1.0, 1e-3, 1.0, streams=(b.stream(branches=pair),))] == []
    apart = tuple(one.model_copy(update={"parallel": False}) for one in pair)
    assert len(signal(1.0, 1e-3, 1.0, streams=(b.stream(branches=apart),))) == 1


def test_np103_tells_the_worst_first_and_skips_what_was_not_measured() -> None:
    (found,) = signal(1e-3, 1e-4, 1.0)
    assert (found.where, found.places) == ("blocks.1.norm", ("blocks.1.norm", "blocks.0.norm"))
    twice = b.stream(final_norm="blocks.0.norm")  # one module, on a small signal and on a large one
    assert [f.where for f in signal(1e-3, 1.0, 1.0, streams=(twice,))] == ["blocks.0.norm"]
    both = signal(1e-3, 1e-2, 1.0)
    assert [(f.severity, f.where, f.places) for f in both] == [
        (Severity.WARNING, "blocks.0.norm", ()),
        (Severity.NOTE, "blocks.1.norm", ()),
    ]
    _, (skipped,) = judge("NP103", b.document(residual=()))
    what, why = "NP103 eps-dominates-signal at blocks", "the stream was not measured"
    assert skipped == Skipped(what=what, why=why, places=("blocks",))


def small(eps: float, scale: float) -> Report:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [models.Block(lambda: models.RMSNorm(eps=eps), "pre") for _ in range(2)]
    model = models.Decoder(blocks, models.RMSNorm(eps=eps)).eval()
    nn.init.normal_(model.embedding.weight, std=scale)
    return normprobe.probe(model, models.ids())


@pytest.mark.parametrize(("eps", "scale", "found"), [(1e-5, 2e-3, 1), (1e-6, 0.02, 0), (1e-5, 0.02, 0)])
def test_np103_on_small_embeddings(eps: float, scale: float, found: int) -> None:
    hits = [f for f in small(eps, scale).findings if f.code == "NP103"]
    assert [f.where for f in hits] == ["blocks.0.mix.norm"] * found
    for hit in hits:
        assert isinstance(hit.value, float)
        assert hit.value == pytest.approx(2.5, rel=0.3)  # eps over 2e-3²


# ---- NP105


def mixed(*eps: float | None, **more: Any) -> list[Finding]:
    paths = [f"blocks.{i}.norm" for i in range(len(eps))]
    placed = [{"eps": e, "eps_placement": "none" if e is None else "inside_sqrt"} for e in eps]
    norms = tuple(b.norm(path, **facts) for path, facts in zip(paths, placed, strict=True))
    branches = tuple(b.branch(f"blocks.{i}") for i in range(len(eps)))
    stream = b.stream(branches=branches, **{"final_norm": None, "needs_final_norm": False} | more)
    found, skipped = judge("NP105", b.document(norms=norms, streams=(stream,)))
    assert skipped == ()
    return list(found)


@pytest.mark.parametrize("odd", [1e-6, 1.6e-5, 1e-3, None])
def test_np105_tells_the_one_that_differs(odd: float | None) -> None:
    (found,) = mixed(1e-5, 1e-5, odd, 1.04e-5)
    assert (found.where, found.severity, found.value, found.limit) == ("blocks.2.norm", Severity.WARNING, odd, 1e-5)
    assert "in 3 of the 4 norms of its kind and place" in found.message


def test_np105_takes_recovered_values_for_one_constant() -> None:
    assert mixed(1e-5, 1.4e-5, 1e-5) == []
    assert mixed(1e-5) == []


def test_np105_without_a_majority_is_a_note() -> None:
    (found,) = mixed(1e-5, 1e-5, 1e-6, 1e-6)
    assert (found.severity, found.places) == (Severity.NOTE, ("blocks.2.norm", "blocks.3.norm"))
    assert "2 have eps 1e-05, 2 have eps 1e-06" in found.message


def test_np105_notes_what_every_block_does_alike() -> None:
    norms = tuple(b.norm(f"blocks.{i}.norm", eps=1e-6 if i % 3 == 2 else 1e-5) for i in range(6))
    branches = tuple(b.branch(f"blocks.{i}", block=f"block.{i // 3}") for i in range(6))
    found, _ = judge("NP105", b.document(norms=norms, streams=(b.stream(branches=branches, final_norm=None),)))
    assert [(f.severity, f.where) for f in found] == [(Severity.NOTE, "blocks.2.norm")]
    own = [one.model_copy(update={"block": one.path}) for one in branches]
    streams = [b.stream(name=f"{k}", branches=tuple(own[3 * k : 3 * k + 3]), final_norm=None) for k in range(2)]
    found, _ = judge("NP105", b.document(norms=norms, streams=tuple(streams)))
    assert [f.severity for f in found] == [Severity.NOTE]
    found, _ = judge("NP105", b.document(norms=norms, streams=tuple(streams[:1])))
    assert [f.severity for f in found] == [Severity.WARNING]


@pytest.mark.parametrize(("odd", "severity"), [((2,), Severity.WARNING), ((2, 5), Severity.NOTE)])
def test_np105_is_a_note_where_every_stream_has_its_odd_one(odd: tuple[int, ...], severity: Severity) -> None:
    norms = tuple(b.norm(f"blocks.{i}.norm", eps=1e-3 if i in odd else 1e-5) for i in range(6))
    branches = [b.branch(f"blocks.{i}") for i in range(6)]
    streams = tuple(b.stream(name=f"{k}", branches=tuple(branches[3 * k : 3 * k + 3]), final_norm=None) for k in (0, 1))
    found, _ = judge("NP105", b.document(norms=norms, streams=streams))
    assert [(f.where, f.severity) for f in found] == [("blocks.2.norm", severity)]


def test_np105_compares_norms_of_one_kind_and_placement() -> None:
    norms = (b.norm(), b.norm("blocks.1.norm"), b.norm("blocks.2.norm", kind="layernorm", eps=1e-6))
    branches = tuple(b.branch(f"blocks.{i}") for i in range(3))
    stream = b.stream(branches=branches, final_norm=None)
    assert judge("NP105", b.document(norms=norms, streams=(stream,))) == ((), ())
    outside = (*norms[:2], b.norm("blocks.2.norm", eps_placement="outside_sqrt"))
    ((found,), _) = judge("NP105", b.document(norms=outside, streams=(stream,)))
    assert "eps 1e-05 outside the root, and eps 1e-05 in 2" in found.message


def test_np105_notes_a_final_norm_of_its_own() -> None:
    norms = (b.norm(), b.norm("blocks.1.norm"), b.norm("norm", eps=1e-6))
    ((found,), _) = judge("NP105", b.document(norms=norms))
    assert (found.where, found.severity) == ("norm", Severity.NOTE)
    assert judge("NP105", b.document(norms=(*norms[:2], b.norm("norm", kind="layernorm", eps=1e-6)))) == ((), ())


def test_np105_in_one_layer_of_a_model() -> None:
    model, inputs = models.decoder("pre", norm=models.RMSNorm)
    assert "NP105" not in [f.code for f in normprobe.probe(model, inputs, level="structure").findings]
    model.blocks[1].think.norm.eps = 1e-3  # type: ignore[index,union-attr]
    (found,) = (f for f in normprobe.probe(model, inputs, level="structure").findings if f.code == "NP105")
    assert (found.where, found.value) == ("blocks.1.think.norm", pytest.approx(1e-3, rel=0.01))


# ---- NP107


@pytest.mark.parametrize(
    ("dtype", "facts", "held", "count"),
    [
        ("bfloat16", {"weight_multiply": "after_cast"}, b.moved(), 1),
        ("float16", {"weight_multiply": "after_cast"}, b.moved(), 1),
        ("float32", {"weight_multiply": "after_cast"}, b.moved(), 0),
        ("bfloat16, float32", {"weight_multiply": "after_cast"}, b.moved(), 0),
        ("float32", {"weight_multiply": "after_cast", "dtype": "bfloat16"}, b.moved(), 1),
        ("bfloat16", {"weight_multiply": "before_cast"}, b.moved(), 0),
        ("bfloat16", {"weight_multiply": "fused"}, b.moved(), 0),
        ("bfloat16", {"weight_multiply": "after_cast"}, b.elements(value=1.0), 0),
        ("bfloat16", {"weight_multiply": "after_cast"}, b.elements(value=-0.5), 0),
        ("bfloat16", {"weight_multiply": "after_cast"}, b.elements(value=0.3), 1),
    ],
)
def test_np107_where_a_rounding_is_lost(dtype: str, facts: dict[str, Any], held: Any, count: int) -> None:
    norms = (b.norm("here", **facts),)
    found, skipped = judge("NP107", b.document(norms=norms, dtype=dtype, norm_gains=(b.gain("here", held),)))
    assert (len(found), skipped) == (count, ())


def test_np107_says_what_it_cannot_tell_in_half_precision_alone() -> None:
    norms = (b.norm("here", weight_multiply="unknown"),)
    found, (skipped,) = judge("NP107", b.document(norms=norms, dtype="bfloat16"))
    assert found == ()
    assert "could not be told" in skipped.why
    assert judge("NP107", b.document(norms=norms)) == ((), ())


@pytest.mark.parametrize(("multiply", "count"), [("after_cast", 1), ("before_cast", 0)])
def test_np107_on_norms_in_bfloat16(multiply: str, count: int) -> None:
    norm = zoo.RMSNorm(multiply=multiply)
    norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(norm, nn.Linear(zoo.WIDTH, 4)).bfloat16()
    inputs: Tensor = torch.randn(3, zoo.WIDTH).bfloat16()
    found = [f for f in normprobe.probe(model, inputs).findings if f.code == "NP107"]
    assert [f.severity for f in found] == [Severity.NOTE] * count
