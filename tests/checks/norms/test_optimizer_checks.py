"""The checks of what an optimiser does to norms: NP114 and NP115, on records and with optimisers of torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.checks import find, run
from normprobe.records import Finding, Severity, Skipped
from normprobe.records.optimizer import OptimizerMeasure
from tests import models
from tests.checks import builders as b


def judge(code: str, known: OptimizerMeasure | None) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(b.document(optimizer=known), [find(code)])


@pytest.mark.parametrize("code", ["NP114", "NP115"])
def test_without_an_optimiser_they_say_how_to_give_one(code: str) -> None:
    found, (skipped,) = judge(code, None)
    assert found == ()
    assert "pass optimizer=" in skipped.why


@pytest.mark.parametrize("code", ["NP114", "NP115"])
def test_master_copies_are_skipped(code: str) -> None:
    found, (skipped,) = judge(code, b.optimizer(foreign=4))
    assert found == ()
    assert "it was made for another one, or holds copies" in skipped.why
    assert judge(code, b.optimizer()) == ((), ())


@pytest.mark.parametrize(
    ("facts", "decay", "said", "severity"),
    [
        ({}, 1e-5, 0.1, Severity.WARNING),
        ({}, 0.0, 0.0, None),
        ({}, None, 0.1, Severity.WARNING),
        ({}, 0.0, 0.1, None),  # the copy shows that it does nothing
        ({"part": "offset"}, 1e-5, 0.1, Severity.NOTE),
        ({"one_plus": True}, 1e-5, 0.1, None),
    ],
)
def test_np114_by_what_a_step_takes(
    facts: dict[str, Any], decay: float | None, said: float | None, severity: Severity | None
) -> None:
    groups = (b.group(), b.group(decay, weight_decay=said))
    found, skipped = judge("NP114", b.optimizer(b.norm_step(group=1, **facts), groups=groups))
    assert ([f.severity for f in found], skipped) == ([] if severity is None else [severity], ())
    for one in found:
        assert f"Adam decays 1 of {2 if facts else 3} {facts.get('part', 'gain')}s of norms" in one.message
        assert "(group 1, weight_decay 0.1)" in one.message


def test_np114_says_where_it_does_not_know() -> None:
    groups = b.group(None, reason="it needs a closure"), b.group(None, weight_decay=0.0), b.group(None)
    steps = b.norm_step("a"), b.norm_step("b", part="offset"), b.norm_step("c", group=1), b.norm_step("d", group=2)
    found, (skipped, other) = judge("NP114", b.optimizer(*steps, groups=groups))
    assert (found, skipped.what) == ((), "NP114 norm-weight-decay at a, b")
    assert skipped.why == "it needs a closure, and its group says no weight_decay"
    assert (other.what, "is not finite, and its group" in other.why) == ("NP114 norm-weight-decay at d", True)


def test_np114_is_one_finding_for_all_gains() -> None:
    steps = b.norm_step("a"), b.norm_step("b", part="offset"), b.norm_step("c"), b.norm_step("d", group=1)
    ((found,), _) = judge("NP114", b.optimizer(*steps, groups=(b.group(1e-4), b.group())))
    assert (found.where, found.places, found.value) == ("a", ("a", "c"), 1e-4)


@pytest.mark.parametrize(("lost", "count"), [(0.5, 0), (0.51, 1), (1.0, 1), (0.0, 0)])
def test_np115_at_its_limit(lost: float, count: int) -> None:
    found, skipped = judge("NP115", b.optimizer(b.norm_step(lost=lost, dtype="bfloat16"), b.norm_step("b")))
    assert ([f.severity for f in found], skipped) == ([Severity.WARNING] * count, ())


def test_np115_tells_the_worst_and_skips_what_has_no_size() -> None:
    steps = b.norm_step("a", 0.6, dtype="bfloat16"), b.norm_step("b", 0.9, dtype="bfloat16")
    ((found,), _) = judge("NP115", b.optimizer(*steps))
    assert (found.where, found.places) == ("b", ("a", "b"))
    assert "a step of 0.001 leaves 90 % of the gain as it is in bfloat16; 2 of 5" in found.message
    unknown = b.norm_step("a", None, dtype="float16"), b.norm_step("b", None)
    found_, (skipped,) = judge("NP115", b.optimizer(*unknown, groups=(b.group(step=None, reason="it follows"),)))
    assert (found_, skipped.what, skipped.why) == ((), "NP115 frozen-by-rounding at a", "it follows")


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return models.Decoder([models.Block(models.layer_norm, "pre") for _ in range(2)], models.layer_norm()).eval()


def findings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Finding]:
    report = normprobe.probe(model, models.ids(), level="structure", optimizer=optimizer)
    return {f.code: f for f in report.findings if f.code in ("NP114", "NP115")}


def test_a_list_of_names_that_misses_the_norms_is_found_out() -> None:
    model = decoder()
    named = dict(model.named_parameters())
    spared = [p for name, p in named.items() if name.endswith("bias") or "LayerNorm.weight" in name]
    rest = [p for p in named.values() if all(p is not other for other in spared)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    found = findings(model, torch.optim.AdamW(groups, lr=1e-3))
    assert found.keys() == {"NP114"}
    assert re.search(r"AdamW decays 5 of 5 gains .*takes 0.0001 of", found["NP114"].message)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    right = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    assert findings(model, torch.optim.AdamW(right, lr=1e-3)) == {}


@pytest.mark.parametrize(("lr", "frozen"), [(1e-3, True), (3e-3, False)])
def test_gains_in_bfloat16_are_frozen_by_small_steps(lr: float, frozen: bool) -> None:
    model = decoder().bfloat16()  # below 1 its numbers are 0.0039 apart
    found = findings(model, torch.optim.Adam(model.parameters(), lr=lr))
    assert found.keys() == ({"NP115"} if frozen else set())
    if frozen:
        assert len(found["NP115"].places) == 5  # offsets are 0, and move


@pytest.mark.parametrize(
    ("dtype", "default", "told"), [("float32", True, 0), ("float32", False, 1), ("bfloat16", True, 1)]
)
def test_np115_does_not_trust_gradients_through_batch_norms_that_never_moved(
    dtype: str, default: bool, told: int
) -> None:
    data = b.document(
        optimizer=b.optimizer(b.norm_step(lost=1.0, dtype=dtype)),
        batchnorm=b.batchnorm(b.batch_norm(default=default)),
    )
    found, skipped = run(data, [find("NP115")])
    assert len(found) == told
    assert any("have never been moved" in one.why for one in skipped) == (not told)
