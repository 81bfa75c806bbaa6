"""What counts as worse than before, and what becomes of a rewrite that does harm, or breaks the model's forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.mending import mend
from normprobe.mending.verdict import verdict
from normprobe.records import Finding, Severity
from normprobe.report.report import Report
from tests.models import WIDTH
from tests.rewrites.cases import narrow_decoder, snapshot


def found(value: Any, severity: Severity = Severity.WARNING, code: str = "NP103", limit: float = 1.0) -> Finding:
    words = {"name": "a-name", "where": "here", "message": "m", "source": "choice"}
    return Finding(code=code, severity=severity, value=value, limit=limit, **words)


@pytest.fixture(scope="module")
def sound() -> Report:
    return normprobe.probe(*narrow_decoder(), level="structure")


MEANT = found(1.0, code="NP106")


def judged(report: Report, earlier: list[list[Finding]], *after: Finding) -> str | None:
    """The verdict on a rewrite that mends `MEANT`, with these findings behind it."""
    data = report.data.model_copy(update={"findings": after, "skipped": ()})
    return verdict([MEANT], [[*findings, MEANT] for findings in earlier], Report(data))


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (10.0, 10.4, False),
        (10.0, 10.6, True),
        (10.0, 2.0, False),
        (0.1, 0.096, False),
        (0.1, 0.09, True),
        (-1.0, -1.05, False),
        (-1.0, -100.0, True),
        (0.0, 0.5, False),
        (0.0, 50.0, True),
        (10.0, 0.0, True),
        (10.0, math.inf, True),
        (10.0, math.nan, True),
        (math.inf, 10.0, False),
        ("a", "b", False),
    ],
)
def test_a_finding_is_worse_where_it_is_further_from_its_limit(
    sound: Report, before: Any, after: Any, worse: bool
) -> None:
    told = judged(sound, [[found(before)]], found(after))
    assert told == (f"it moved NP103 a-name at here from {before} to {found(after).value}" if worse else None)


def test_a_little_worse_each_time_adds_up(sound: Report) -> None:
    steps = [[found(10 * 1.04**n)] for n in range(3)]
    assert judged(sound, steps[:1], *steps[1]) is None
    assert judged(sound, steps[:2], *steps[2]) == f"it moved NP103 a-name at here from 10.0 to {steps[2][0].value}"
    assert judged(sound, [[found(10.0)], [found(2.0)]], found(9.0)) == "it moved NP103 a-name at here from 2.0 to 9.0"


def test_a_finding_is_worse_where_it_is_graver_or_new(sound: Report) -> None:
    graver = judged(sound, [[found(10.0)]], found(10.0, Severity.ERROR))
    assert graver == "it made NP103 a-name at here worse, error instead of warning"
    assert judged(sound, [[found(10.0, Severity.ERROR)]], found(10.0)) is None
    assert judged(sound, [[found(10.0)], []], found(10.0)) == "it raised NP103 a-name at here"


class Plain(nn.Module):
    """RMSNorm, eps added to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * self.weight


class Block(nn.Module):
    """A block that takes its norm for granted where it is `picky`."""

    def __init__(self, picky: bool) -> None:
        super().__init__()
        self.norm = Plain() if picky else nn.RMSNorm(WIDTH, eps=1e-6)
        self.up, self.down, self.picky = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), picky

    def forward(self, x: Tensor) -> Tensor:
        if self.picky and type(self.norm) is not Plain:
            raise TypeError("the fast path wants Plain")
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


def picky() -> tuple[nn.Module, Tensor]:
    """No final norm, and three blocks whose norms no rewrite can change."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(i < 3) for i in range(4)], nn.Linear(WIDTH, 8))
    return model.eval(), torch.randn(2, 5, WIDTH)


def test_an_error_of_the_model_is_a_reason_and_what_was_mended_before_it_stays() -> None:
    model, x = picky()
    before = snapshot(model)
    done = mend(model, x, allow="breaking")
    assert [step.name for plan in done.applied for step, _ in plan.steps] == ["AddFinalNorm"]
    (why,) = [one.why for one in done.left if one.finding.code == "NP101"]
    assert why.startswith("SetEps was not applied: ")
    assert "TypeError: the fast path wants Plain" in why
    model(x)
    done.undo()
    assert snapshot(model) == before


def test_an_error_of_any_kind_while_it_is_planned_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("normprobe.mending.attempt.make_plan", broken)
    (left,) = mend(*narrow_decoder()).left
    assert left.why == "UpcastNorms was not applied: ZeroDivisionError: planted"


def test_an_error_of_the_probe_after_a_rewrite_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = narrow_decoder()
    before, report = snapshot(model), normprobe.probe(model, inputs)

    def broken(*args: Any, **kwargs: Any) -> Report:
        raise IndexError("planted")

    monkeypatch.setattr("normprobe.mending.probed.probe", broken)
    (left,) = mend(model, inputs, report=report).left
    assert left.why.endswith("taken back: the model could not be probed again: IndexError: planted")
    assert snapshot(model) == before


def test_an_interrupt_takes_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rewrite stands already; the second is interrupted while its report is made."""
    model, inputs = narrow_decoder(final=False)
    before, report, runs = snapshot(model), normprobe.probe(model, inputs), []

    def stopped(*args: Any, **kwargs: Any) -> Report:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return normprobe.probe(*args, **kwargs)

    monkeypatch.setattr("normprobe.mending.probed.probe", stopped)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        mend(model, inputs, report=report, allow="breaking")
    assert len(runs) == 2
    assert snapshot(model) == before


def test_every_report_that_stood_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(meant: Any, earlier: Any, after: Report) -> str | None:
        seen.append([[one.code for one in findings] for findings in earlier])
        return verdict(meant, earlier, after)

    monkeypatch.setattr("normprobe.mending.attempt.verdict", spy)
    mend(*narrow_decoder(final=False), allow="breaking")
    assert seen == [[["NP201", "NP106"]], [["NP201", "NP106"], ["NP106"]]]
