"""The health of gains of which one parameter holds those of all layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import normprobe
from normprobe.records import Finding
from tests.plain import INPUT, LAYERS, WIDTH, Plain


def _nan(model: Plain) -> None:
    model.second[1][2] = math.nan


def _outlier(model: Plain) -> None:
    model.first[1][3] = 900.0


def _dead(model: Plain) -> None:
    model.first[1].zero_()


def _drawn(model: Plain) -> None:
    model.second[2].normal_(std=1e-3)


def found(code: str, model: Plain, **options: object) -> list[Finding]:
    return [f for f in normprobe.probe(model, INPUT, **options).findings if f.code == code]


@pytest.mark.parametrize(
    ("plant", "code", "norm"),
    [(_nan, "NP109", 3), (_drawn, "NP109", 5), (_dead, "NP110", 2), (_outlier, "NP111", 2)],
)
def test_one_layer_is_named(plant: Callable[[Plain], None], code: str, norm: int) -> None:
    model = Plain(stacked=True)
    assert found(code, model) == []
    with torch.no_grad():
        plant(model)
    (finding,) = found(code, model)
    assert finding.where == normprobe.probe(model, INPUT, level="structure").anatomy.norms[norm].path


def test_decay_and_rounding_of_stacked_gains() -> None:
    model = Plain(stacked=True)
    decayed = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    (finding,) = found("NP114", model, optimizer=decayed, level="structure")
    assert len(finding.every_place) == 2 * LAYERS + 1
    model = model.bfloat16()
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        (finding,) = found("NP115", model, optimizer=optimizer(model.parameters(), lr=1e-4), level="backward")
        assert len(finding.every_place) == 2 * LAYERS + 1


def test_statistics_are_of_the_part() -> None:
    model = Plain(stacked=True)
    with torch.no_grad():
        model.first[2].fill_(3.0)
    gains = normprobe.probe(model, INPUT, level="forward").measurements.norm_gains
    told = {one.gain.parameter: (one.gain.count, one.gain.constant) for one in gains if one.gain is not None}
    assert told["first[2]"] == (WIDTH, 3.0)
    assert told["first[1]"] == (WIDTH, 1.0)
