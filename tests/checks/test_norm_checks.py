"""The checks that judge one norm: NP101, NP102, NP106, NP108, NP208."""

from __future__ import annotations

import re
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.checks.norms.name_contradicts_behaviour import claimed
from normprobe.records import Finding, ReportData, Skipped
from tests.checks import builders as b


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


def one(code: str, dtype: str = "float32", /, **facts: Any) -> Finding | None:
    """What `code` finds at a single norm."""
    found, skipped = judge(code, b.document(norms=(b.norm("here", **facts),), dtype=dtype))
    assert skipped == ()
    assert [f.where for f in found] in ([], ["here"])
    return found[0] if found else None


@pytest.mark.parametrize(
    ("placement", "eps", "words"),
    [
        ("outside_sqrt", 1e-4, r"√v \+ eps instead.*factor of 1.4 at an input RMS of 0.01"),
        ("outside_sqrt", 1e-5, "factor of 1.41 at an input RMS of 0.003162"),
        ("clamp", 1e-4, r"max\(√v, eps\) instead.*factor of 1.414"),
        ("clamp", 4.0, "factor of 0.7071 at an input RMS of 2"),
        ("scaled", 1e-5, "squared peak"),
    ],
)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "batchnorm", "groupnorm", "instancenorm"])
def test_np101_says_where_a_port_would_differ(kind: str, placement: str, eps: float, words: str) -> None:
    found = one("NP101", kind=kind, eps_placement=placement, eps=eps, eps_clamps="root")
    assert found is not None
    assert (found.value, found.severity.value) == (eps, "warning")
    assert re.search(words, found.message)


@pytest.mark.parametrize("kind", ["l2norm", "scalenorm", "grn", "dyt", "lrn"])
@pytest.mark.parametrize("placement", ["outside_sqrt", "clamp"])
def test_np101_leaves_kinds_alone_for_which_it_is_the_published_form(kind: str, placement: str) -> None:
    assert one("NP101", kind=kind, eps_placement=placement) is None


@pytest.mark.parametrize("placement", ["outside_sqrt", "clamp"])
def test_np101_passes_an_eps_that_changes_no_activation(placement: str) -> None:
    assert one("NP101", eps_placement=placement, eps=1e-12, eps_clamps="root") is None
    assert one("NP101", eps_placement=placement, eps=1e-8, eps_clamps="root") is not None


@pytest.mark.parametrize("clamps", ["mean_square", None])
def test_np101_notes_a_clamp_inside_the_root(clamps: str | None) -> None:
    found = one("NP101", eps_placement="clamp", eps=1e-3, eps_clamps=clamps)
    assert found is not None
    assert found.severity.value == "note"
    assert "above 1e-06 instead" in found.message
    assert "a factor of 1.414, at an input RMS of 0.001" in found.message
    assert one("NP101", eps_placement="clamp", eps=1e-6, eps_clamps=clamps) is None  # at 0.01, √(1e-4 + 1e-12)


@pytest.mark.parametrize("facts", [{"module": False}, {"kind": "batchnorm", "batch_dependent": True}, {}])
def test_np106_offers_its_mend_where_it_applies(facts: dict[str, Any]) -> None:
    found = one("NP106", reduction="input", **facts)
    assert found is not None
    assert found.fix == (None if facts else "UpcastNorms")


@pytest.mark.parametrize("placement", ["inside_sqrt", "none"])
def test_np101_passes_eps_inside(placement: str) -> None:
    assert one("NP101", eps_placement=placement) is None


@pytest.mark.parametrize(
    ("dtype", "facts", "becomes"),
    [
        ("float16", {"eps": 1e-12, "reduction": "input"}, "becomes 0 in float16"),
        ("torch.float16", {"eps": 1e-8, "reduction": "input"}, "becomes 0 in float16"),
        ("float16", {"eps": 4e-8, "reduction": "input"}, "becomes 5.96e-08 in float16"),
        ("float16", {"eps": 1e-12, "eps_placement": "clamp", "kind": "l2norm"}, "becomes 0 in float16"),
        ("float16", {"eps": 1e-12, "eps_placement": "outside_sqrt"}, "becomes 0 in float16"),
        ("bfloat16", {"eps": 1e-41, "reduction": "input"}, "becomes 0 in bfloat16"),
        ("float32", {"eps": 1e-46, "reduction": "input"}, "becomes 0 in float32"),
    ],
)
def test_np102_finds_an_eps_that_is_lost(dtype: str, facts: dict[str, Any], becomes: str) -> None:
    found = one("NP102", dtype, **facts)
    assert found is not None
    assert becomes in found.message
    assert found.value == facts["eps"]
    assert isinstance(found.limit, float)
    assert found.limit > facts["eps"]


@pytest.mark.parametrize(
    ("dtype", "facts"),
    [
        ("float16", {"eps": 6e-8, "reduction": "input"}),
        ("float16", {"eps": 1e-6, "reduction": "unknown"}),
        ("float16", {"eps": 1e-12, "reduction": "float32"}),
        ("float16", {"eps": 1e-12, "reduction": "native"}),
        ("bfloat16", {"eps": 1e-12, "reduction": "input"}),
        ("float32", {"eps": 1e-12, "reduction": "input"}),
        ("float16", {"eps": None, "eps_placement": "none", "kind": "l2norm"}),
        ("float16", {"eps": None, "eps_placement": "none", "executed": False}),
        ("float16", {"eps": 1e-12, "kind": "batchnorm", "frozen": True, "reduction": "input"}),
        ("float16", {"eps": None, "kind": "dyt", "eps_placement": "unknown"}),
    ],
)
def test_np102_passes_an_eps_that_is_kept(dtype: str, facts: dict[str, Any]) -> None:
    assert one("NP102", dtype, **facts) is None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_np102_warns_where_there_is_no_eps(dtype: str) -> None:
    found = one("NP102", dtype, eps=None, eps_placement="none")
    assert found is not None
    assert (found.severity.value, found.value, found.fix) == ("warning", 0.0, None)
    assert found.message == "no eps is in force, or one of 0: a row of zeros gives NaN"


@pytest.mark.parametrize(
    "facts",
    [{"eps": 1e-12, "reduction": "unknown"}, {"eps": None}, {"eps": 1e-12, "eps_placement": "unknown"}],
)
def test_np102_says_what_it_cannot_tell(facts: dict[str, Any]) -> None:
    found, skipped = judge("NP102", b.document(norms=(b.norm("here", **facts),), dtype="float16"))
    assert found == ()
    assert [row.what for row in skipped] == ["NP102 eps-vanishes-in-dtype at here"]


def test_np102_says_that_the_dtype_is_unknown() -> None:
    found, skipped = judge("NP102", b.document(norms=(b.norm("here", reduction="input"),), dtype="posit16"))
    assert found == ()
    assert skipped[0].what.endswith("at here")
    assert "'posit16', is not one" in skipped[0].why


@pytest.mark.parametrize(
    ("model", "seen", "severity"),
    [
        ("float32", "float16", "error"),  # autocast
        ("float32", "bfloat16", "warning"),
        ("float16", "float32", "note"),  # cast before the norm
        ("float32, float16", "float32", "note"),
        ("float16, float32", "float16", "error"),
        ("float16, float32", "", "error"),
        ("float32, float16", "", "error"),
        ("float32, bfloat16", "", "warning"),
        ("float32, uint8", "", "note"),
    ],
)
def test_np106_judges_by_what_the_norm_saw(model: str, seen: str, severity: str) -> None:
    found = one("NP106", model, reduction="input", dtype=seen)
    assert found is not None
    assert found.severity.value == severity
    assert ("one of" in found.message) is ("," in model and not seen)
    assert f"{seen or model}" in found.message


@pytest.mark.parametrize(
    ("model", "seen", "lost"),
    [
        ("float32", "float16", True),
        ("float16", "float32", False),
        ("float16, float32", "float32", False),
        ("float16, float32", "float16", True),
        ("float16, float32", "", True),
        ("float32, float16", "", True),
        ("float32, float8_e4m3fn", "", False),
        ("float8_e4m3fn, bfloat16", "", False),
        ("posit16", "float16", True),
    ],
)
def test_np102_judges_by_what_the_norm_saw(model: str, seen: str, lost: bool) -> None:
    found = one("NP102", model, reduction="input", eps=1e-12, dtype=seen)
    assert (found is not None) is lost
    assert found is None or ("not recorded" in found.message) is (not seen)


@pytest.mark.parametrize(
    ("dtype", "severity", "words"),
    [
        ("float16", "error", "overflow from |x| = 256 on"),
        ("bfloat16", "warning", "keeps 8 bits"),
        ("float32", "note", "float32 now: float16 would overflow"),
        ("", "note", "unknown now"),
    ],
)
def test_np106_is_as_severe_as_its_consequence_today(dtype: str, severity: str, words: str) -> None:
    found = one("NP106", dtype, reduction="input")
    assert found is not None
    assert found.severity.value == severity
    assert words in found.message


@pytest.mark.parametrize(
    "facts",
    [
        {"reduction": "native"},
        {"reduction": "float32"},
        {"reduction": "input", "kind": "dyt"},
        {"reduction": "unknown", "kind": "affine"},
        {"reduction": "input", "kind": "batchnorm", "frozen": True},
    ],
)
def test_np106_passes_what_does_not_sum_in_half_precision(facts: dict[str, Any]) -> None:
    assert one("NP106", "float16", **facts) is None


def test_np106_says_what_it_cannot_tell() -> None:
    found, skipped = judge("NP106", b.document(norms=(b.norm("a", reduction="unknown"), b.norm("b"))))
    assert (found, [row.what for row in skipped]) == ((), ["NP106 half-precision-reduction at a"])


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("LayerNorm", "LayerNorm"),
        ("T5LayerNorm", "LayerNorm"),
        ("LayerNorm2d", "LayerNorm"),
        ("LlamaRMSNorm", "RMSNorm"),
        ("RMSLayerNorm", "RMSNorm"),
        ("GroupRMSNorm", "RMSNorm"),
        ("Rms_Norm", "RMSNorm"),
        ("SyncBatchNorm", "BatchNorm"),
        ("FrozenBatchNorm2d", "BatchNorm"),
        ("GroupNorm", "GroupNorm"),
        ("InstanceNorm1d", "InstanceNorm"),
        ("Norm", None),
        ("ScaleNorm", None),
        ("BatchToGroupNorm", "GroupNorm"),
        ("BatchNormToGroupNorm", None),
        ("Transforms", None),
        ("", None),
    ],
)
def test_np108_reads_a_claim_only_where_a_name_makes_one(name: str, claim: str | None) -> None:
    assert claimed(name) == claim


@pytest.mark.parametrize(
    ("name", "kind", "centred"),
    [
        ("T5LayerNorm", "rmsnorm", False),
        ("RMSNorm", "layernorm", True),
        ("BatchNorm2d", "groupnorm", True),
        ("GroupNorm", "batchnorm", True),
        ("InstanceNorm2d", "layernorm", True),
        ("LayerNorm", "dyt", False),
        ("LayerNorm", "identity", None),
    ],
)
def test_np108_finds_a_contradiction(name: str, kind: str, centred: bool | None) -> None:
    found = one("NP108", class_name=name, kind=kind, subtracts_mean=centred)
    assert found is not None
    assert found.message.startswith(f"{name} is named ")
    assert f"it computes {kind}" in found.message
    assert ("subtracts no mean" in found.message) is (centred is False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LayerNorm", "layernorm"),
        ("LayerNorm", "groupnorm"),
        ("LayerNorm", "instancenorm"),
        ("RMSNorm", "rmsnorm"),
        ("RMSNorm", "l2norm"),
        ("BatchNorm2d", "batchnorm"),
        ("BatchNorm2d", "affine"),
        ("GroupNorm", "layernorm"),
        ("GroupNorm", "instancenorm"),
        ("InstanceNorm2d", "groupnorm"),
        ("Norm", "rmsnorm"),
        ("Norm", "unknown"),
        ("", "layernorm"),
    ],
)
def test_np108_passes_what_agrees_coincides_or_claims_nothing(name: str, kind: str) -> None:
    assert one("NP108", class_name=name, kind=kind) is None


def idle(path: str) -> Any:
    return b.norm(path, role="unused", executed=False, executions=0, class_name="Norm")


@pytest.mark.parametrize(
    "path",
    [
        "norm",  # beside everything else
        "blocks.0.old_norm",  # beside a norm that ran
        "blocks.0.attn.q_norm",  # inside attention that ran
        "blocks.1.mlp.norm",  # beside a parameter that a branch used
        "head.norm",  # inside the head
    ],
)
def test_np208_finds_a_norm_that_its_running_module_forgot(path: str) -> None:
    write = b.branch("blocks.1", parameters=("blocks.1.mlp.fc.weight",))
    data = b.document(norms=(b.norm(), idle(path)), streams=(b.stream(branches=(b.branch("blocks.0"), write)),))
    found, skipped = judge("NP208", data)
    assert [(f.where, f.value, f.limit, f.unit) for f in found] == [(path, None, None, "")]
    assert skipped == ()


@pytest.mark.parametrize(
    "path",
    ["tower.blocks.0.norm", "tower.norm", "blocks.10.norm", "blocks.0.attn2.norm", "blocks.0.att.norm"],
)
def test_np208_skips_a_norm_of_a_module_that_did_not_run(path: str) -> None:
    found, skipped = judge("NP208", b.document(norms=(b.norm(), idle(path), idle("tower.blocks.1.norm"))))
    assert found == ()
    assert path in skipped[0].what
    assert "nothing else was seen to run" in skipped[0].why


def test_np208_notes_a_norm_of_an_optional_branch() -> None:
    norm = idle("blocks.0.cross_norm").model_copy(update={"idle_beside": ("blocks.0.cross",)})
    (found,), _ = judge("NP208", b.document(norms=(b.norm(), norm)))
    assert found.severity.value == "note"
    assert found.message.endswith("although the module around it ran; nor was cross beside it")


def test_np208_passes_norms_that_ran() -> None:
    assert judge("NP208", b.document()) == ((), ())
