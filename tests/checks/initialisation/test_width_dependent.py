"""NP607: what sweeps over widths show, on records, on small networks, and at the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import normprobe
from normprobe.checks import find, judged_sweep, run
from normprobe.cli.commands import app
from normprobe.errors import SettingError
from normprobe.records import Finding, Settings, Severity
from normprobe.records.sweep import ModuleScale, Sweep, SweepReport
from tests.checks import builders as b

WIDTHS = (64, 128, 256)


def swept(*slopes: tuple[float, float], kind: Any = "mup", axis: Any = "width", **more: Any) -> SweepReport:
    """A sweep whose modules have these exponents of output and movement."""
    rows = tuple(
        ModuleScale(
            path=f"layer.{i}",
            activation=tuple(width**a for width in WIDTHS),
            update=tuple(width**u for width in WIDTHS),
            activation_slope=a,
            update_slope=u,
            verdict="unknown",
        )
        for i, (a, u) in enumerate(slopes)
    )
    one = Sweep(parametrisation=kind, modules=rows)
    return SweepReport(axis=axis, sizes=WIDTHS, steps=4, lr=1e-3, loss="own", seed=0, sweeps=(one,), **more)


def judged(*slopes: tuple[float, float], settings: Settings | None = None, **more: Any) -> tuple[Finding, ...]:
    return judged_sweep(swept(*slopes, **more), settings or Settings()).findings


@pytest.mark.parametrize(
    ("slopes", "against"),
    [
        ((0.0, 0.0), None),
        ((0.4, 0.4), None),
        ((0.41, 0.0), "grows"),
        ((0.0, 0.41), "grows"),
        ((0.0, -0.4), None),
        ((0.0, -0.41), "vanishes"),
        ((-0.5, 0.0), None),
        ((0.5, -0.5), "grows"),
        ((0.0, math.nan), None),
        ((math.nan, 0.0), "grows"),
        ((math.inf, 0.0), "grows"),
    ],
)
def test_under_mup_growth_and_vanishing_are_warnings(slopes: tuple[float, float], against: str | None) -> None:
    found = judged((0.0, 0.0), slopes)
    assert [one.severity for one in found] == ([] if against is None else [Severity.WARNING])
    if against is not None:
        assert found[0].where == "layer.1"
        assert found[0].limit == getattr(find("NP607"), against)
        assert "under muP 1 of 2 modules" in found[0].message


def test_what_does_not_go_one_way_from_width_to_width_is_chance() -> None:
    uneven = {"activation": (1.0, 9.0, 8.0), "update": (9.0, 1.0, 2.0), "activation_slope": 1.5, "update_slope": -1.1}
    once = {"activation": (1.0, 1.1, 3.0), "update": (3.0, 1.0, 0.9), "activation_slope": 0.8, "update_slope": -0.87}
    twice = {"activation": (1.0, 1.2, 3.0), "update": (3.0, 1.0, 0.8), "activation_slope": 0.8, "update_slope": -0.95}
    report = swept((0.0, 0.0))
    for facts, limits in ((uneven, []), (once, []), (twice, [0.4]), (twice | {"activation": (1.0,) * 3}, [-0.4])):
        rows = tuple(row.model_copy(update=facts) for row in report.sweeps[0].modules)
        sweeps = (report.sweeps[0].model_copy(update={"modules": rows}),)
        found = judged_sweep(report.model_copy(update={"sweeps": sweeps}), Settings()).findings
        assert [one.limit for one in found] == limits


@pytest.mark.parametrize(
    ("slopes", "severity"), [((0.5, 0.0), "note"), ((0.0, -0.5), "note"), ((math.inf, 0.0), "warning")]
)
def test_two_widths_alone_are_a_note(slopes: tuple[float, float], severity: str) -> None:
    report = swept(slopes)
    (row,) = report.sweeps[0].modules
    two = row.model_copy(update={"activation": row.activation[:2], "update": row.update[:2]})
    sweeps = (report.sweeps[0].model_copy(update={"modules": (two,)}),)
    (finding,) = judged_sweep(report.model_copy(update={"sizes": WIDTHS[:2], "sweeps": sweeps}), Settings()).findings
    assert finding.severity.value == severity


def test_a_module_that_does_not_move_is_not_judged() -> None:
    still = ModuleScale(
        path="a", activation=(1.0,) * 3, update=(0.0,) * 3, activation_slope=0, update_slope=math.nan, verdict="unknown"
    )
    report = swept((0.0, 0.0))
    sweeps = (report.sweeps[0].model_copy(update={"modules": (still,)}),)
    assert judged_sweep(report.model_copy(update={"sweeps": sweeps}), Settings()).findings == ()


def test_under_standard_parametrisation_growth_is_a_note() -> None:
    (found,) = judged((0.0, 0.0), (0.5, 1.0), (0.6, 0.4), (0.0, -0.9), kind="standard")
    assert (found.severity, found.value, found.every_place) == (Severity.NOTE, 1.0, ("layer.1", "layer.2"))
    assert "2 of 4 modules give or move by more" in found.message


def test_depths_are_skipped_and_settings_heard() -> None:
    report = judged_sweep(swept((1.0, 1.0), kind="standard", axis="depth"), Settings())
    assert (report.findings, [one.why for one in report.skipped]) == ((), ["the sweep is over depths"])
    assert judged((0.45, 0.0), settings=Settings(limits={"NP607": {"grows": 0.5}})) == ()
    assert judged((0.0, -0.45), settings=Settings(limits={"NP607": {"vanishes": -0.5}})) == ()
    (found,) = judged((0.0, -0.3), settings=Settings(limits={"NP607": {"vanishes": -0.25}}))
    assert found.limit == -0.25
    ignored = judged_sweep(swept((1.0, 1.0)), Settings(ignore=("NP607", "NP2")))  # NP2 has nothing to do with sweeps
    assert (ignored.checks, ignored.findings) == ((), ())
    assert [(one.code, one.why) for one in ignored.ignored] == [("NP607", "in ignore")]
    silent = judged_sweep(swept((1.0, 1.0)), Settings(per_path_ignores={"layer*": ("NP6",)}))
    assert (silent.findings, silent.ignored[0].findings) == ((), 1)
    assert judged_sweep(swept((1.0, 1.0)), Settings()).checks == ("NP607",)


def test_an_audit_of_one_model_does_not_mention_it() -> None:
    assert run(b.document(), [find("NP607")]) == ((), ())
    report = normprobe.probe(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    assert "NP607" not in report.data.checks
    assert not [one for one in report.skipped if one.what.startswith("NP607")]
    assert normprobe.probe(nn.Linear(4, 4), torch.randn(2, 4), settings=Settings(ignore=("NP607",))).data.ignored


class Net(nn.Module):
    """A perceptron that is wrong by a factor of the width in one place."""

    def __init__(self, width: int, fault: str = "") -> None:
        super().__init__()
        self.fault, self.width = fault, width
        self.first, self.second, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.scaled, self.hidden, self.summed = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.scaled(x * self.width**0.5 if self.fault == "root" else x)
        x = self.second(torch.relu(x))
        x = torch.relu(self.hidden(x / self.width if self.fault == "shrunk" else x))
        if self.fault == "sum":
            return self.summed(x.sum(-1, keepdim=True))
        return self.last(x)


def checked(fault: str) -> list[Finding]:
    report = normprobe.coordinate_check(lambda w: (Net(w, fault), torch.randn(32, 8)), WIDTHS, lr=0.01, steps=3)
    return list(report.findings)


def test_a_sound_network_is_noted_under_standard_parametrisation_alone() -> None:
    (found,) = checked("")
    assert found.severity is Severity.NOTE
    assert "second" in found.every_place


@pytest.mark.parametrize(("fault", "where"), [("root", "scaled"), ("sum", "summed"), ("shrunk", "hidden")])
def test_a_factor_of_the_width_that_no_parameter_holds_is_a_warning(fault: str, where: str) -> None:
    limit = -0.4 if fault == "shrunk" else 0.4
    (found,) = [one for one in checked(fault) if one.severity is Severity.WARNING and one.limit == limit]
    assert where in found.every_place


def test_unknown_checks_are_refused_before_anything_is_trained() -> None:
    def never(width: int) -> nn.Module:
        raise AssertionError("built")

    with pytest.raises(SettingError, match="NP999"):
        normprobe.coordinate_check(never, WIDTHS, settings=Settings(ignore=("NP999",)))


SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.first, self.last = width, nn.Linear(8, width), nn.Linear(width, 4)
        self.scaled = nn.Identity()
    def forward(self, x):
        return self.last(torch.relu(self.scaled(self.first(x) * self.width ** 0.5)))

def build(width):
    return Net(width), torch.randn(16, 8)
"""


def called(tmp_path: Path, *more: str) -> Any:
    (tmp_path / "net.py").write_text(SOURCE)
    arguments = ["sweep", f"{tmp_path / 'net.py'}:build", "--widths", "32,64,128", "-q", *more]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


def test_the_command_tells_and_fails_from_the_severity_asked_for(tmp_path: Path) -> None:
    result = called(tmp_path, "--isolated")
    assert result.exit_code == 0
    assert "NP607" in result.stdout
    assert "normprobe explain NP607" in result.stdout
    assert called(tmp_path, "--isolated", "--fail-on", "warning").exit_code == 1
    config = tmp_path / "normprobe.toml"
    config.write_text('fail-on = "warning"\nignore = ["NP607"]\n')
    none = called(tmp_path, "--config", str(config))
    assert (none.exit_code, none.stdout) == (2, "")
    assert "no check is left that judges a sweep" in none.stderr
    assert "NP101, NP102, NP103, NP104 and 6" in none.stderr  # and more
    assert "judge one model: normprobe audit TARGET" in none.stderr
    config.write_text('fail-on = "warning"\n[per-path-ignores]\n"*" = ["NP607"]\n')
    silent = called(tmp_path, "--config", str(config))
    assert silent.exit_code == 0
    assert "Left out by the settings" in silent.stdout
    found = json.loads(called(tmp_path, "--isolated", "--format", "json").stdout)
    assert {one["severity"] for one in found["findings"] if one["code"] == "NP607"} >= {"warning"}
    assert found["checks"] == ["NP607"]
