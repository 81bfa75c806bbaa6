"""The checks of gradients by depth: NP501, NP502, NP503, on records and on small models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.checks import find, judged, run
from normprobe.records import Finding, GradientLaw, GradientMeasure, Settings, Skipped
from normprobe.records.gradients import LayerGradient
from normprobe.records.init import Initialisation
from tests.checks import builders as b

ALL = ("NP501", "NP502", "NP503")


def judge(code: str, found: GradientMeasure | None, **more: Any) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(b.document(gradients=found, **more), [find(code)])


@pytest.mark.parametrize("sign", [1, -1])
def test_np501_has_its_limit_in_both_directions(sign: int) -> None:
    """Five branches: the ends of the line are four slopes apart."""
    at = math.log(30) / 4
    assert judge("NP501", b.sloping(sign * at * 0.999, 0.01, 5)) == ((), ())
    (found,), _ = judge("NP501", b.sloping(sign * at * 1.001, 0.01, 5))
    assert found.value == pytest.approx(30, rel=0.01)
    assert found.where == ("blocks.4" if sign > 0 else "blocks.0")
    assert f"gradients of the {'last' if sign > 0 else 'first'} branches" in found.message


def test_np501_needs_to_be_sure_of_the_slope() -> None:
    assert judge("NP501", b.sloping(2.0, 2.1)) == ((), ())
    assert [f.code for f in judge("NP501", b.sloping(2.0, 1.9))[0]] == ["NP501"]


def of_norms(*norms: float) -> GradientMeasure:
    found = b.gradients(sizes=(0.1,) * len(norms))
    rows = zip(found.branches, norms, strict=True)
    branches = tuple(branch.model_copy(update={"parameter_norm": norm}) for branch, norm in rows)
    return found.model_copy(update={"branches": branches})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (b.gradients(slope=9.0), "there are too few branches of one kind for an interval of the slope"),
        (of_norms(1.0, 0.0, 1.0), "the gradient of a branch is 0, and has no logarithm"),
        (of_norms(1.0, 0.0, math.nan), "a gradient is not finite (NP504)"),
        (
            b.gradients(sizes=(), stream=None, layers=(LayerGradient(parameter="0.weight", output_norm=1.0),)),
            "no branch of a residual stream has parameters: layers in a row are not compared",
        ),
        (None, "no gradients were measured"),
    ],
)
def test_np501_says_why_there_is_no_line(found: GradientMeasure | None, why: str) -> None:
    findings, skipped = judge("NP501", found)
    assert (findings, [one.why for one in skipped]) == ((), [why])


def test_np501_states_the_closed_form_and_leaves_the_far_ends_to_others() -> None:
    law = GradientLaw(slope=0.0, last_to_first=1.0, branch_rms=1.0, source="Xiong et al. 2020, sec. 3")
    (found,), _ = judge("NP501", b.sloping(-2.0, 0.1, expected=law))
    assert found.message.endswith("the closed form for this placement has the slope 0")
    steep = b.sloping(-2.0, 0.1)
    first, *others = steep.branches
    lost = steep.model_copy(update={"branches": (first.model_copy(update={"activation_rms": 1e-9}), *others)})
    data = b.document(gradients=lost)
    both = Settings(select=("NP501", "NP502", "NP503"))

    def told(**more: Any) -> list[str]:
        return [finding.code for finding in judged(data, both.model_copy(update=more)).findings]

    assert told() == [f.code for f in run(data, [find(code) for code in ALL])[0]] == ["NP502"]
    assert told(ignore=("NP502",)) == told(limits={"NP502": {"min_ratio": 0.0}}) == ["NP501"]
    assert told(per_path_ignores={lost.branches[0].path: ("NP502",)}) == ["NP501"]


@pytest.mark.parametrize(("code", "at"), [("NP502", 1e-3), ("NP503", 1e3)])
def test_np502_and_np503_have_their_limits(code: str, at: float) -> None:
    beyond = at * (0.999 if at < 1 else 1.001)
    assert judge(code, b.gradients(sizes=(at, 0.5, 1.0))) == ((), ())
    (found,), _ = judge(code, b.gradients(sizes=(beyond, 0.5, 1.0)))
    assert (found.where, found.value) == ("blocks.0", pytest.approx(beyond))
    assert "blocks.2, 3 places away" in found.message
    layers = tuple(LayerGradient(parameter=f"{i}.weight", output_norm=x) for i, x in enumerate((beyond, 1.0)))
    (found,), _ = judge(code, b.gradients(sizes=(), stream=None, layers=layers))
    assert (found.where, "by the outputs of the layers" in found.message) == ("0.weight", True)


@pytest.mark.parametrize(("trained", "severity"), [(True, "note"), (False, "warning"), (None, "warning")])
def test_a_model_that_was_trained_gets_notes(trained: bool | None, severity: str) -> None:
    init = Initialisation(trained=trained, evidence=(), writes=(), roles=(), weights=())
    for code, found in (
        ("NP501", b.sloping(-2.0, 0.1)),
        ("NP502", b.gradients(sizes=(1e-5, 0.1))),
        ("NP503", b.gradients(sizes=(900.0, 0.1))),
    ):
        assert [f.severity.value for f in judge(code, found, init=init)[0]] == [severity]


@pytest.mark.parametrize(
    ("facts", "severity"),
    [({"default": True}, "note"), ({"default": False}, "warning"), ({"default": True, "keeps": "fixed"}, "warning")],
)
def test_statistics_that_never_moved_leave_a_note(facts: dict[str, Any], severity: str) -> None:
    known = b.batchnorm(b.batch_norm(**facts))
    (found,), _ = judge("NP502", b.gradients(sizes=(1e-5, 0.1)), batchnorm=known)
    assert found.severity.value == severity


@pytest.mark.parametrize("code", ["NP502", "NP503"])
@pytest.mark.parametrize("sizes", [(math.nan, 0.1), (math.inf, 0.1), (0.1, math.inf), (0.1, 0.0), (0.1,)])
def test_what_cannot_be_compared_is_skipped(code: str, sizes: tuple[float, ...]) -> None:
    """NP504 tells of what is not finite."""
    found, skipped = judge(code, b.gradients(sizes=sizes))
    assert found == ()
    assert [row.why for row in skipped] == ["no finite gradient reached two places of a stream or layers"]
    assert [row.why for row in judge(code, None)[1]] == ["no gradients were measured"]


@pytest.mark.parametrize("code", ["NP502", "NP503"])
def test_behind_the_first_tap_nothing_is_compared(code: str) -> None:
    """The last of the adds that count is the one that the features are taken behind."""
    sizes = (0.5, 1.0, 2e-4, 2e4)
    assert judge(code, b.gradients(sizes=sizes, until=1)) == ((), ())
    assert len(judge(code, b.gradients(sizes=(2e-4 if code == "NP502" else 2e4, 1.0, 1.0), until=1))[0]) == 1
    why = "the output takes features off the stream behind blocks.0: later ones tell nothing"
    assert [row.why for row in judge(code, b.gradients(sizes=sizes, until=0))[1]] == [why]
    (skip,) = judge("NP501", b.gradients(sizes=sizes, until=0))[1]
    assert skip.why.endswith(why)


class Tapped(nn.Module):
    """A pre-norm stack whose output sums the features of some of its blocks, each with a weight of its own."""

    def __init__(self, taps: dict[int, float], blocks: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(blocks))
        self.maps = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(blocks))
        self.taps = taps
        self.heads = nn.ModuleDict({str(i): nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8)) for i in taps})

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for i, (norm, linear) in enumerate(zip(self.norms, self.maps, strict=True)):
            x = x + linear(norm(x))
            if i in self.taps:
                found.append(self.taps[i] * self.heads[str(i)](x))
        return torch.stack(found).sum(0)


def test_features_taken_on_the_way() -> None:
    """The last features hardly count, so that the gradients of late blocks are small; that is the decoder's choice."""
    model, x = Tapped({5: 1.0, 11: 1e-4}), torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
    report = probe(model, x, level="backward")
    (stream,) = report.anatomy.streams
    assert [i for i, branch in enumerate(stream.branches) if branch.tapped] == [5]
    gradients = report.data.measurements.gradients
    assert gradients is not None
    assert (gradients.until, len(gradients.compared()), gradients.kinds[0].branches) == (5, 6, 6)
    assert [f.code for f in report.findings if f.code in ALL] == []
    alone = probe(Tapped({11: 1.0}), x, level="structure").anatomy
    assert [branch.tapped for branch in alone.streams[0].branches] == [False] * 12


class Stack(nn.Module):
    """Blocks of one linear branch each: pre-norm, post-norm or without norms, with a gain on every branch."""

    def __init__(self, blocks: int, placement: str, gain: float, skip: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.post, self.skip = placement == "post", skip
        self.norms = nn.ModuleList(nn.Identity() if placement == "none" else nn.LayerNorm(32) for _ in range(blocks))
        self.maps = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(blocks))
        for linear in self.maps:
            nn.init.normal_(linear.weight, std=gain / math.sqrt(32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            x = norm(self.skip * x + linear(x)) if self.post else self.skip * x + linear(norm(x))
        return self.head(x if self.post else self.norm(x))


def plain(gain: float, layers: int, function: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    rows: list[nn.Module] = []
    for _ in range(layers):
        rows += [nn.Linear(64, 64), function()]
        nn.init.normal_(rows[-2].weight, std=gain / 8)
    return nn.Sequential(*rows, nn.Linear(64, 8))


def codes(model: nn.Module, width: int) -> list[str]:
    x = torch.randn(4, 6, width, generator=torch.Generator().manual_seed(1))
    return [f.code for f in probe(model, x, level="backward").findings if f.code in ALL]


@pytest.mark.parametrize(
    ("model", "width", "expected"),
    [
        (lambda: Stack(24, "pre", 1.0), 32, []),
        (lambda: Stack(24, "post", 0.1), 32, []),
        (lambda: plain(math.sqrt(2), 12, nn.ReLU), 64, []),
        (lambda: plain(1.0, 12, nn.Identity), 64, []),
        (lambda: Stack(24, "none", 0.1, skip=0.5), 32, ["NP502"]),
        (lambda: plain(1.0, 10, nn.Sigmoid), 64, ["NP502"]),
        (lambda: plain(0.4, 12, nn.Identity), 64, ["NP502"]),
        (lambda: plain(3.0, 12, nn.Identity), 64, ["NP503"]),
        (lambda: Stack(24, "pre", 1.0, skip=1.5), 32, ["NP503"]),
    ],
)
def test_small_models(model: Any, width: int, expected: list[str]) -> None:
    assert codes(model(), width) == expected
