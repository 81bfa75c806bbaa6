"""Recipes: rewrites by name, and errors that name line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from normprobe.errors import SettingError
from normprobe.patching.recipe import made, read_recipe, read_words
from normprobe.rewrites import ALL, AddQKNorm, Initialise, SetEps

GOOD = """
# before a fine-tune
[[rewrite]]
name = "AddQKNorm"
start = "calibrated"

[[rewrite]]
name = "initialise"
scheme = "xavier"
only = ["h.*.mlp.*", "head"]
seed = 3
"""


def recipe(folder: Path, text: str) -> Path:
    path = folder / "patch.toml"
    path.write_text(text)
    return path


def test_a_recipe_gives_its_rewrites_in_order(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, GOOD)) == (
        AddQKNorm(start="calibrated"),
        Initialise("xavier", seed=3, only=("h.*.mlp.*", "head")),
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"AddQKNorm"',
            '"AddQKNrom"',
            ["line 4, key name", "no rewrite AddQKNrom", "did you mean AddQKNorm?"],
        ),
        (
            'start = "calibrated"',
            'begin = "calibrated"',
            ["line 5, key begin", "has no setting begin", "start"],
        ),
        ('"calibrated"', '"calibratd"', ["line 5, key start", "unit | calibrated | distilled", "'calibratd'"]),
        ("seed = 3", 'seed = "x"', ["line 11, key seed", "a whole number", "found: 'x'"]),
        ("seed = 3", 'seed = "3"', ["line 11, key seed", "a whole number", "found: '3'"]),
        ("seed = 3", "seed = 3.0", ["line 11, key seed", "a whole number", "found: 3.0"]),
        ('start = "calibrated"', 'eps = "1e-5"', ["line 5, key eps", "eps: a number", "found: '1e-5'"]),
        ('start = "calibrated"', 'eps = 1e-5\nsteps = "9"', ["line 6, key steps", "a whole number", "found: '9'"]),
        ('start = "calibrated"', "shared = 1", ["line 5, key shared", "True or False", "found: 1"]),
        ('["h.*.mlp.*", "head"]', "[1]", ["line 10, key only", "only: one pattern", "found: [1]"]),
        ('["h.*.mlp.*", "head"]', "3", ["line 10, key only", "only: one pattern", "found: 3"]),
        ("seed = 3", "seed = -3", ["line 11, key seed", "0 <= seed"]),
        ('"xavier"', '"xaver"', ["line 9, key scheme", "gpt2 | xavier"]),
        ('name = "AddQKNorm"', "", ["line 3: a rewrite without a name"]),
        ('name = "AddQKNorm"', "name = 3", ["line 4, key name: a rewrite without a name"]),
        ("# before", "other = 1\n# before", ["line 2, key other: unknown key other", "[[rewrite]]"]),
        (GOOD, "", ["patch.toml: no rewrites", "found: nothing"]),
        (
            GOOD,
            '[rewrite]\nname = "ToDyT"',
            ["line 1, key rewrite: no rewrites", "found: [rewrite]", "double brackets"],
        ),
        (GOOD, "rewrite = 3", ["line 1, key rewrite: no rewrites"]),
        (GOOD, "", ["no rewrites"]),
        ("[[rewrite]]", "[[rewrite", ["no valid TOML", "line 3"]),
    ],
)
def test_errors_name_line_and_key(tmp_path: Path, old: str, new: str, said: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        read_recipe(recipe(tmp_path, GOOD.replace(old, new, 1)))
    for part in said:
        assert part in str(caught.value)


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="the recipe cannot be read"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="the recipe cannot be read"):
        read_recipe(tmp_path / "bytes.toml")


def test_words_are_read_as_a_call() -> None:
    assert read_words("SetEps(eps=1e-5, only=['a', 'b'])") == SetEps(1e-5, only=("a", "b"))
    assert read_words(" seteps ") == SetEps()


@pytest.mark.parametrize("words", ["SetEps(1e-5)", "SetEps(eps=x)", "SetEps(eps=1", "a.b()", "", "SetEps(**{})"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(SettingError, match=r"a rewrite cannot be read|has no setting"):
        read_words(words)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_every_rewrite_can_be_made_from_its_plain_values(kind: type) -> None:
    rewrite = kind()
    values = {key: value for key, value in rewrite.to_dict().items() if key != "rewrite"}
    assert made(rewrite.name, values) == rewrite
