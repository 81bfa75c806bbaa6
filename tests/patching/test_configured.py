"""A configuration comes along as it was written, but for what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normprobe.patching.configured import changed_fields, write_config

STATED = '{"eps": 0.00001, "by": "Þór",\r\n  "text": {"eps": 1e-06}}'
BEFORE: dict[str, Any] = {
    "eps": 1e-5,
    "by": "Þór",
    "usual": 3,
    "text": {"eps": 1e-6, "usual": 4},
    "unsaid": {"eps": 1e-6, "usual": 5},
}


def written(folder: Path, after: dict[str, Any]) -> str:
    (folder / "source.json").write_bytes(STATED.encode())
    write_config(folder / "source.json", folder, BEFORE, after)
    return (folder / "config.json").read_bytes().decode()


def test_where_nothing_changed_it_is_the_same_to_the_letter(tmp_path: Path) -> None:
    assert written(tmp_path, BEFORE) == STATED


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({"eps": 1e-3}, {"eps": 1e-3}),
        ({"new": [1]}, {"new": [1]}),
        ({"text": {"eps": 1e-3, "usual": 4}}, {"text": {"eps": 1e-3}}),
        ({"unsaid": {"eps": 1e-3, "usual": 5}}, {"unsaid": {"eps": 1e-3, "usual": 5}}),
        ({"text": {"eps": 1e-6}}, {"text": {"eps": 1e-6}}),
        ({"text": None}, {"text": None}),
    ],
)
def test_what_changed_is_stated_and_nothing_else(tmp_path: Path, changed: dict[str, Any], more: dict[str, Any]) -> None:
    text = written(tmp_path, {**BEFORE, **changed})
    assert json.loads(text) == {**json.loads(STATED), **more}
    assert "Þór" in text


def test_fields_are_named_with_what_they_lie_in() -> None:
    after = {**BEFORE, "text": {"eps": 1e-3, "usual": 4}, "by": "", "unsaid": {"eps": 1e-6}}
    assert [*changed_fields(BEFORE, after)] == [("by",), ("text", "eps"), ("unsaid",)]
