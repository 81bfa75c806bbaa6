"""Settings of the wrong kind are refused when the rewrite is made, by the field's name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.errors import RewriteError, SettingError
from normprobe.rewrites import (
    ALL,
    AddFinalNorm,
    AddOutputNorms,
    AddQKNorm,
    Fixup,
    FoldGains,
    Initialise,
    MuP,
    QKClip,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    SetEps,
    StoreGains,
    ToDyT,
    ToGroupNorm,
    ToPostNorm,
    ToRMSNorm,
    load,
)

WRONG: list[tuple[type[Rewrite], str, Any, str]] = [
    (SetEps, "eps", "1e-5", "eps: a number or None"),
    (SetEps, "eps", True, "eps: a number or None"),
    (SetEps, "eps", -1.0, "0 <= eps < 1"),
    (SetEps, "eps", float("nan"), "0 <= eps < 1"),
    (QKClip, "limit", "a", "limit: a number"),
    (QKClip, "limit", True, "limit: a number"),
    (QKClip, "limit", None, "limit: a number"),
    (Initialise, "seed", "a", "seed: a whole number"),
    (Initialise, "seed", 1.5, "seed: a whole number"),
    (Initialise, "seed", True, "seed: a whole number"),
    (Initialise, "scheme", 3, "scheme: a text"),
    (Initialise, "only", 3, "only: one pattern"),
    (Fixup, "seed", 1.5, "seed: a whole number"),
    (Fixup, "seed", -1, "0 <= seed < 2**31"),
    (Fixup, "variant", "tfixup", "variant: fixup | t_fixup"),
    (MuP, "base_width", 64.5, "base_width: a whole number"),
    (MuP, "base_head_dim", "8", "base_head_dim: a whole number or None"),
    (FoldGains, "expect", -1, "expect: a number of sites from 0, or None"),
    (FoldGains, "expect", True, "expect: a whole number or None"),
    (FoldGains, "expect", "3", "expect: a whole number or None"),
    (AddFinalNorm, "kind", "rms_norm", "kind: same | layernorm | rmsnorm"),
    (AddFinalNorm, "eps", "x", "eps: a number or None"),
    (AddOutputNorms, "start", "x", "start: unit | calibrated"),
    (AddOutputNorms, "eps", 2.0, "0 < eps < 1"),
    (AddQKNorm, "kind", "rms", "kind: rmsnorm | layernorm | l2norm"),
    (AddQKNorm, "axis", ["head"], "axis: head | full"),
    (AddQKNorm, "steps", 2.5, "steps: a whole number"),
    (AddQKNorm, "shared", 1, "shared: True or False"),
    (ScaleResidual, "kind", "layer_scale", "kind: constant | layerscale | rezero | skipinit | deepnorm"),
    (ScaleResidual, "value", "x", "value: a number or None"),
    (ScaleResidual, "preserve", "no", "preserve: True or False"),
    (ToRMSNorm, "tied", "untied", "tied: entry | untie"),
    (ToRMSNorm, "exact", "no", "exact: True or False"),
    (StoreGains, "stored", "gemma", "stored: weight | one_plus_weight"),
    (ToDyT, "start", "x", "start: calibrated | unit"),
    (ToGroupNorm, "groups", 0, "groups from 1"),
    (ToGroupNorm, "groups", 2.0, "groups: a whole number or None"),
    (ToPostNorm, "deepnorm", 1, "deepnorm: True or False"),
    (Reparametrise, "eps", "x", "eps: a number"),
    (Reparametrise, "kind", "weightnorm", "kind: weight_norm | weight_standardization"),
]


@pytest.mark.parametrize(("kind", "field", "value", "expected"), WRONG)
def test_a_setting_of_another_kind_is_refused_by_name(
    kind: type[Rewrite], field: str, value: Any, expected: str
) -> None:
    told = rf"(?s){kind.name} cannot be made.*expected: {re.escape(expected)}.*found: {re.escape(repr(value))}"
    if field == "only":
        told = rf"(?s)choice of places cannot be read.*expected: {re.escape(expected)}"
    with pytest.raises(RewriteError, match=told):
        kind(**{field: value})


@pytest.mark.parametrize("kind", ALL, ids=lambda each: each.name)
def test_every_field_of_every_rewrite_is_held_against_its_kind(kind: type[Rewrite]) -> None:
    for field in dataclasses.fields(kind):
        with pytest.raises(RewriteError):
            kind(**{field.name: object()})
    assert kind(expect=0).expect == 0


def test_whole_numbers_are_numbers() -> None:
    assert QKClip(limit=30).limit == 30


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: load("x"), r"(?s)no rewrite can be loaded.*expected: what Rewrite.to_dict gave.*found: str: 'x'"),
        (lambda: load({"rewrite": "SetEps", "eps": "x"}), "SetEps cannot be made"),
        (lambda: normprobe.mend(nn.Linear(4, 4), torch.randn(2, 4), "report"), r"(?s)report is none.*normprobe.probe"),
    ],
)
def test_what_is_no_report_and_no_rewrite_is_told(call: Callable[[], object], said: str) -> None:
    with pytest.raises((RewriteError, SettingError), match=said):
        call()
