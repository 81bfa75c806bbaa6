"""Faults in networks whose blocks are no modules are found by the data flow alone."""

from __future__ import annotations

import pytest
import torch

import normprobe
from tests.checks.placement.planted import anatomy, codes, found
from tests.plain import INPUT, LAYERS, WIDTH, Pairs, Plain

SLIPS = [
    ("every attention raw", "NP213", "warning", LAYERS),
    ("one attention raw", "NP206", "warning", 1),
    ("one norm on the trunk", "NP204", "warning", 1),
    ("last norm too early", "NP203", "error", 1),
    ("no skip", "NP309", "warning", LAYERS),
    ("normed twice", "NP207", "warning", 1),
    ("no last norm", "NP201", "error", 1),
]
TOKENS = torch.randn(2, 6, WIDTH)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("slip", "code", "severity", "places"), SLIPS)
def test_a_slip_in_one_forward(slip: str, code: str, severity: str, places: int, stacked: bool) -> None:
    (finding,) = found(code, Plain(slip, stacked), INPUT)
    assert (finding.severity.value, len(finding.every_place)) == (severity, places)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_places_are_those_of_the_adds(stacked: bool) -> None:
    (finding,) = found("NP206", Plain("one attention raw", stacked), INPUT)
    (stream,) = anatomy(Plain("one attention raw", stacked), INPUT).streams
    assert finding.where == stream.branches[4].add.place
    assert finding.where.startswith(".#add:")


@pytest.mark.parametrize("stacked", [False, True])
def test_a_sound_forward_is_silent_and_its_layers_are_told(stacked: bool) -> None:
    assert codes(Plain(stacked=stacked), INPUT) == set()
    (stream,) = anatomy(Plain(stacked=stacked), INPUT).streams
    assert [[branch.kind for branch in block] for block in stream.blocks()] == [["attention", "mlp"]] * LAYERS
    assert [branch.layer for branch in stream.branches] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_layers_in_two_lists() -> None:
    assert codes(Pairs(), TOKENS) == set()
    (bare,) = found("NP213", Pairs("every attention raw"), TOKENS)
    assert len(bare.places) == LAYERS
    (odd,) = found("NP206", Pairs("one mlp raw"), TOKENS)
    assert odd.where == ".#add:5"


def test_what_is_said_of_one_layer_has_its_own_place() -> None:
    """A baseline that knows of a dead layer hides no other one."""
    model = Plain()
    with torch.no_grad():
        model.down[2].zero_()
    report = normprobe.probe(model, INPUT, level="backward")
    (dead,) = [finding for finding in report.findings if finding.code == "NP305"]
    (stream,), (measure,) = report.anatomy.streams, report.measurements.residual
    places = [branch.add.place for branch in stream.branches]
    assert dead.every_place == (places[5],)
    assert [state.path for state in measure.states] == places
    assert report.measurements.gradients is not None
    assert [branch.path for branch in report.measurements.gradients.branches] == places
