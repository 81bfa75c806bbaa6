"""Rewrites are applied in the order in which their options stand on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normprobe.errors import SettingError
from normprobe.patching.asked import Asked
from tests.cli.test_patch import Run, run, source

__all__ = ["run", "source"]  # the fixtures

RECIPE = '[[rewrite]]\nname = "FoldGains"\n\n[[rewrite]]\nname = "StoreGains"\nstored = "one_plus_weight"\n'


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("--output-norms unit --swap norm:dyt", ["AddOutputNorms", "ToDyT"]),
        ("--eps 1e-4 --rewrite FoldGains", ["SetEps", "FoldGains"]),
        ("--rewrite FoldGains --eps 1e-4 --rewrite=AddOutputNorms", ["FoldGains", "SetEps", "AddOutputNorms"]),
        ("--eps 1e-4 --recipe RECIPE --output-norms=unit", ["SetEps", "FoldGains", "StoreGains", "AddOutputNorms"]),
        ("--recipe RECIPE --eps 1e-4", ["FoldGains", "StoreGains", "SetEps"]),
    ],
)
def test_the_order_is_that_of_the_command_line(
    run: Run, source: Path, tmp_path: Path, asked: str, names: list[str]
) -> None:
    recipe = tmp_path / "patch.toml"
    recipe.write_text(RECIPE)
    words = [str(recipe) if word == "RECIPE" else word for word in asked.split()]
    found = run(*words, source, "--plan", "--format", "json")
    assert found.exit_code == 0, found.output
    assert [step["rewrite"]["rewrite"] for step in json.loads(found.stdout)["steps"]] == names


def test_what_was_given_twice_is_at_both_places() -> None:
    asked = Asked(
        swap=["norm:dyt", "pre:post"],
        rewrite=["FoldGains", "SetEps"],
        upcast_norms=True,
        order=["rewrite", "checkpoint", "swap", "upcast_norms", "upcast_norms", "swap", "plan", "rewrite"],
    )
    names = [rewrite.name for rewrite in asked.rewrites()]
    assert names == ["FoldGains", "ToDyT", "UpcastNorms", "ToPostNorm", "SetEps"]


@pytest.mark.parametrize("asked", [{"eps": 1e-5, "order": ["eps", "init", "eps"]}, {"order": ["recipe", "recipe"]}])
def test_one_value_that_is_given_twice_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"--(eps|recipe) is given twice"):
        Asked(**asked).rewrites()
