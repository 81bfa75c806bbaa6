"""Every rewrite in small models of several kinds; benchmarks/rewrites.py takes all of the known ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from torch import nn

from benchmarks.rewriting import SETTINGS, Cell, Subject, all_tried, tried
from benchmarks.rewriting_table import PAGE, general, section, static
from normprobe.records import Anatomy
from normprobe.rewrites import ALL, Effect, Rewrite, Site, Sites, Survey
from tests.faults.architectures import BUILDS
from tests.models import decoder
from tests.rewrites.cases import Scaled

# The second transformer has every second rewrite; the benchmark takes all in all.
MODELS = {"gpt2": SETTINGS, "gemma3": SETTINGS[1::2], "pictures": SETTINGS, "free": SETTINGS}
PLACE = "blocks.0.mix.branch.out"


@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_promised_of_every_rewrite_holds(name: str) -> None:
    cells = all_tried(name, BUILDS[name], MODELS[name])
    assert [(cell.rewrite, cell.settings, cell.errors) for cell in cells if cell.errors] == []
    assert sum(cell.said == "applied" for cell in cells) >= 3


def test_every_rewrite_is_tried() -> None:
    assert {rewrite.name for rewrite in SETTINGS} == {rewrite.name for rewrite in ALL}


def test_the_page_describes_the_rewrites_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [rewrite for rewrite in SETTINGS if static(rewrite) not in page] == []


@dataclass(frozen=True)
class Planted(Rewrite):
    """Changes one module by `how`, and says that it is breaking."""

    name: ClassVar[str] = "Planted"
    how: Callable[[nn.Module, ExitStack], None] = lambda module, undo: None

    @property
    def effect(self) -> Effect:
        return Effect.BREAKING

    def describe(self) -> str:
        return "a planted fault"

    def sites(self, survey: Survey) -> Sites:
        return Sites((Site(PLACE, "planted"),))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        self.how(model.get_submodule(site.path), undo)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        return

    def to_dict(self) -> dict[str, Any]:
        return {"rewrite": self.name}


@final
class Remembering(nn.Linear):
    """Multiplies by a number that it does not save."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.__dict__["factor"]


def for_good(module: nn.Module, undo: ExitStack) -> None:
    module.get_parameter("weight").data.mul_(2.0)


def beside_the_state(module: nn.Module, undo: ExitStack) -> None:
    undo.callback(module.__dict__.pop, "factor")
    undo.callback(setattr, module, "__class__", type(module))
    module.__dict__["factor"] = float(module.get_parameter("weight").detach()[0, 0])
    module.__class__ = Remembering


def hooked(module: nn.Module, undo: ExitStack) -> None:
    """A hook on the copy would go on reading the weight of the original."""
    undo.callback(module.register_forward_hook(lambda m, a, output: output * float(module.weight[0, 0])).remove)  # type: ignore[operator,index]


@pytest.mark.parametrize(
    ("rewrite", "told"),
    [
        (Scaled(factor=1.01, paths=(PLACE,)), "apply: could not prove Scaled"),
        (Planted(how=for_good), f"undo: not as it was: tensor {PLACE}.weight"),
        (Planted(how=beside_the_state), "save and load: "),
    ],
)
def test_what_does_not_hold_is_told(rewrite: Rewrite, told: str) -> None:
    cell = tried(Subject("planted", *decoder("pre")), rewrite)
    assert cell.said == "error"
    assert [error for error in cell.errors if error.startswith(told)]


def test_a_plan_that_crashes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "sites", lambda self, survey: 1 / 0)
    cell = tried(Subject("planted", *decoder("pre")), Planted())
    assert (cell.said, cell.errors) == ("error", ("plan: ZeroDivisionError: division by zero",))


def test_the_table_counts_by_setting_and_names_reasons_and_errors() -> None:
    cells = [
        Cell("SetEps", {}, "one", "applied", 2, ("norm.1 has 3 of them",), 1e-7),
        Cell("SetEps", {}, "two", "refused", 0, ("norm.2 has 4 of them", "norm.3 has 4 of them")),
        Cell("SetEps", {"eps": 0.001}, "one", "error", errors=("undo: not as it was",)),
    ]
    text = section(cells)
    assert text.startswith("2 architectures.")
    assert "| 1 | 1 | 0 | 0 | 1.0e-07 |" in text
    assert "- `SetEps()`: … has … of them (2)" in text
    assert "- `SetEps(eps=0.001)` in one: undo: not as it was" in text


def test_a_reason_is_told_without_its_place() -> None:
    assert general("it ends in the norm h.3.norm, whose gain scales 64 channels.") == (
        "it ends in the norm … whose gain scales … channels."
    )
