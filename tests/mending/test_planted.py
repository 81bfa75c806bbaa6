"""What a check says mends its finding does: faults are planted, the rewrite is applied, and the finding is gone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.checks import ALL as CHECKS
from normprobe.mending import mend
from normprobe.mending.verdict import keys
from normprobe.report.wording import mend_text
from normprobe.rewrites import Effect
from tests.faults.architectures import BUILDS
from tests.faults.fault import Fault
from tests.faults.operators import ALL
from tests.faults.running import Subject
from tests.rewrites.cases import snapshot

# Code, fault, model, the least effect that has to be allowed, and the call that the report prints.
MENDED = [
    ("NP101", "eps added to the root instead of into it", "by_hand", "calibrated", 'SetEps(only="blocks.'),
    ("NP101", "the root clamped at eps", "llama", "calibrated", 'SetEps(only="model.layers.'),
    ("NP102", "eps 1e-12 added in float16", "by_hand", "exact", "UpcastNorms()"),
    ("NP103", "eps a thousand times what customary signals have", "by_hand", "breaking", "SetEps(eps=1e-05)"),
    ("NP104", "eps of every norm from another library's default", "gpt2", "breaking", "SetEps(eps=1e-05, only=["),
    ("NP105", "eps of one norm left at another default", "by_hand", "breaking", "SetEps(eps=1e-05, only="),
    ("NP106", "squares summed in bfloat16", "by_hand", "exact", "UpcastNorms()"),
    ("NP109", "a gain of what memory held: tiny numbers", "by_hand", "breaking", 'Initialise(only="norms")'),
    ("NP109", "a gain drawn about 0 in a new model", "pictures", "breaking", 'Initialise(only="norms")'),
    ("NP110", "a gain of zeros", "by_hand", "breaking", 'Initialise(only="norms")'),
    ("NP112", "1 added to the weight of one norm that applies 1 + w", "gemma3", "breaking", 'Initialise(only="norms")'),
    ("NP116", "every layer norm written out", "by_hand", "exact", "FuseNorms(only=["),
    ("NP201", "the final norm replaced by the identity", "llama", "breaking", "AddFinalNorm()"),
    ("NP202", "the final norm twice", "by_hand", "calibrated", "RemoveNorms(only="),
    ("NP207", "the norm before a branch twice", "llama", "calibrated", "RemoveNorms(only="),
    ("NP208", "a norm that a block builds and never calls", "gpt2", "exact", "RemoveNorms(only="),
    ("NP401", "query weights of ten thousand times their size: logits", "llama", "calibrated", "QKClip(limit=47.5)"),
    ("NP405", "query weights of ten thousand times their size: advice", "by_hand", "breaking", "AddQKNorm(only="),
    ("NP601", "Xavier's gain before ReLU", "layers", "breaking", 'Initialise(scheme="kaiming", only=["0.weight", '),
    (
        "NP602",
        "writers drawn like readers in a deep stack",
        "deep",
        "breaking",
        'Initialise(scheme="gpt2", only="writers")',
    ),
    (
        "NP603",
        "writers drawn three times as large as the class draws them",
        "gpt2",
        "breaking",
        'Initialise(scheme="gpt2", only=[',
    ),
    (
        "NP604",
        "Kaiming's recipe on weights stored as [in, out]",
        "gpt2",
        "breaking",
        'Initialise(scheme="kaiming", only=[',
    ),
    ("NP605", "a weight of one constant", "by_hand", "breaking", 'Initialise(scheme="'),
    ("NP605", "half of the outputs and their readers copied", "deep", "breaking", 'Initialise(scheme="gpt2", only='),
    ("NP606", "what a branch reads by and writes by both zeros", "by_hand", "breaking", 'Initialise(scheme="'),
    ("NP702", "a batch of one small picture in train mode", "pictures", "calibrated", "ToGroupNorm(only="),
    (
        "NP704",
        "one norm that does not share its statistics with the other processes",
        "pictures",
        "exact",
        "ToSyncBatchNorm(only=",
    ),
    ("NP706", "one norm left in eval mode while training", "pictures", "exact", "FreezeBatchNorm(only="),
    ("NP706", "gain and offset frozen, statistics not", "pictures", "exact", "FreezeBatchNorm(only="),
]
EFFECTS = [effect.value for effect in Effect]
ELSEWHERE = {"NP205", "NP211"}  # see below: no operator plants them in a model that its rewrite can change


@cache
def subject(build: str) -> Subject:
    return Subject(build, BUILDS[build])


def planted(code: str, name: str, build: str) -> tuple[nn.Module, Any, Fault]:
    (fault,) = [fault for fault in ALL if (fault.code, fault.name) == (code, name)]
    sound = subject(build).sound(fault.conditions)
    model, inputs = subject(build)._made(fault.conditions)
    known = {place for found, place in keys(sound.findings) if found == code}
    fault.plant(model, sound.anatomy, 0, known)
    return model, inputs, fault


def probed(model: nn.Module, inputs: Any, fault: Fault, *select: str) -> normprobe.Report:
    level = "forward" if fault.conditions.level == "structure" else fault.conditions.level
    settings = normprobe.Settings(select=select)
    return normprobe.probe(model, inputs, level=level, measures=fault.conditions.measures, settings=settings)


@pytest.mark.parametrize(
    ("code", "name", "build", "allow", "call"), MENDED, ids=[f"{row[0]}-{row[1].replace(' ', '-')}" for row in MENDED]
)
def test_a_planted_fault_is_mended_and_nothing_new_is_found(
    code: str, name: str, build: str, allow: str, call: str
) -> None:
    model, inputs, fault = planted(code, name, build)
    before = snapshot(model)
    with fault.conditions.around():
        everything = keys(probed(model, inputs, fault).findings)
        report = probed(model, inputs, fault, code)
        meant = [one for one in report.findings if one.fix]
        assert call in mend_text(meant)
        for milder in EFFECTS[: EFFECTS.index(allow)]:
            held = mend(model, inputs, report=report, allow=milder)
            assert [one.why for one in held.left if one.finding.fix and f"is {allow} (" in one.why]
            assert held.mended == ()
        assert snapshot(model) == before
        done = mend(model, inputs, report=report, allow=allow)
        again = keys(probed(model, inputs, fault).findings)
    assert [step.findings for step in done.mended] == [tuple(meant)], str(done)
    assert not keys(meant) & again
    assert again < everything
    done.undo()
    assert snapshot(model) == before


def test_every_check_with_a_rewrite_is_in_the_table() -> None:
    assert {check.code for check in CHECKS if check.fixes} == {row[0] for row in MENDED} | ELSEWHERE


def encoder(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """A post-norm stack of torch, as it is drawn."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval(), torch.randn(2, 8, 32)


def test_a_deep_post_norm_stack_gets_both_halves_of_deepnorm() -> None:
    model, inputs = encoder(26)
    report = normprobe.probe(model, inputs)
    assert report.findings[0].code == "NP205"
    assert mend_text(report.findings) == (
        'normprobe.rewrite(model, [normprobe.ScaleResidual(kind="deepnorm"), normprobe.Initialise(scheme="deepnorm")])'
    )
    done = mend(model, inputs, report=report, allow="breaking")
    assert (done.after.findings, done.left) == ((), ())
    assert [rewrite.name for rewrite, _ in done.applied[0].steps] == ["ScaleResidual", "Initialise"]


@pytest.mark.parametrize(
    ("half", "other"),
    [
        (normprobe.ScaleResidual("deepnorm"), 'Initialise(scheme="deepnorm")'),
        (normprobe.Initialise("deepnorm"), 'ScaleResidual(kind="deepnorm")'),
    ],
)
def test_either_half_of_deepnorm_asks_for_the_other(half: normprobe.Rewrite, other: str) -> None:
    model, inputs = encoder(6)
    normprobe.rewrite(model, half, inputs)
    report = normprobe.probe(model, inputs)
    assert [one.code for one in report.findings] == ["NP211"]
    assert mend_text(report.findings) == f"normprobe.rewrite(model, [normprobe.{other}])"
    assert mend(model, inputs, report=report, allow="breaking").after.findings == ()
