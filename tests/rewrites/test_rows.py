"""A plan in brief: places that differ by their numbers alone are one line."""

from __future__ import annotations

import pytest

from normprobe.rewrites.base import Refusal, Site, Sites
from normprobe.rewrites.norms.eps import SetEps
from normprobe.rewrites.rows import rows_of, shortened


def sites(*paths: str) -> Sites:
    return Sites(tuple(Site(path, "set", touched=(f"{path}.weight",)) for path in paths))


def test_places_that_differ_by_numbers_are_one_line() -> None:
    found = sites("h.0.norm", "h.1.norm", "h.11.norm", "h.1.norm2", "final")
    assert rows_of(SetEps(), found, brief=True)[2:] == [
        "  h.*.norm: set (3 places)",
        "    edits h.*.norm.weight",
        "  h.1.norm2: set",
        "    edits h.1.norm2.weight",
        "  final: set",
        "    edits final.weight",
    ]
    assert len(rows_of(SetEps(), found)) == 2 + 2 * 5


@pytest.mark.parametrize("change", ["eps 1e-05 becomes 0.001", "layernorm2 becomes dyt.5"])
def test_other_numbers_stay(change: str) -> None:
    found = Sites((Site("0", change), Site("1", change)))
    assert rows_of(SetEps(), found, brief=True)[2:] == [f"  *: {change} (2 places)"]


def test_names_in_what_changes_are_told_once() -> None:
    found = Sites(tuple(Site(f"h.{i}.norm", f"0.5 times goes into h.{i}.attn.q, h.{i}.mlp") for i in range(3)))
    assert rows_of(SetEps(), found, brief=True)[2:] == [
        "  h.*.norm: 0.5 times goes into h.*.attn.q, h.*.mlp (3 places)"
    ]


def test_refusals_stay_whole() -> None:
    found = Sites((), (Refusal("a", "no"), Refusal("b", "no")))
    assert rows_of(SetEps(), found, brief=True) == rows_of(SetEps(), found)


def test_long_lists_are_cut_in_brief_alone() -> None:
    rows = [f"now: {i}" for i in range(10)]
    assert shortened(rows, brief=False) == rows
    assert shortened(rows, brief=True) == [*rows[:3], "… and 7 lines more"]
    assert shortened(rows[:4], brief=True) == rows[:4]
