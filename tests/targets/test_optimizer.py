"""Optimisers by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from normprobe.errors import TargetError
from normprobe.targets import load_optimizer

SOURCE = """
import torch
import recipe

def build(model):
    print("printed by the factory")
    return torch.optim.SGD(model.parameters(), lr=recipe.LR)

def nothing(model):
    return [1, 2]

def breaks(model):
    raise KeyError("no such group")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "recipe.py").write_text("LR = 0.25\n")
    (tmp_path / "train.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "recipe", raising=False)
    return str(tmp_path / "train.py")


def test_a_function_is_called_with_the_model(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 3)
    found = load_optimizer(f"{source}:build", model)
    assert isinstance(found, torch.optim.SGD)
    assert found.param_groups[0]["lr"] == 0.25
    assert {id(p) for p in found.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert capsys.readouterr().out == ""


def test_a_class_is_called_with_all_parameters() -> None:
    found = load_optimizer("torch.optim:AdamW", nn.Linear(2, 3))
    assert isinstance(found, torch.optim.AdamW)
    assert len(found.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AdamW", "--optimizer names no factory"),
        ("{}:nothing", "returned no optimiser"),
        ("{}:breaks", "the factory of the optimiser raised"),
        ("{}:absent", "has no absent"),
        ("no_such_module:build", "no module named no_such_module"),
        ("torch:nn", "the factory of the optimiser raised"),
    ],
)
def test_what_gives_no_optimiser_is_refused(name: str, said: str, source: str) -> None:
    with pytest.raises(TargetError, match=said):
        load_optimizer(name.format(source), nn.Linear(2, 3))
