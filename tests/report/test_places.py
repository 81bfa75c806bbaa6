from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normprobe.report.places import joined, ranges, shorten


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["h.0.norm", "h.1.norm", "h.2.norm"], ["h.0–2.norm"]),
        (["h.0.norm", "h.2.norm", "h.3.norm"], ["h.0,2–3.norm"]),
        (["h.10.a", "h.9.a"], ["h.9–10.a"]),
        ([f"h.{k}.a" for k in (7, 0, 33, 2, 20, 1)], ["h.0–2,7,20,33.a"]),
        (["h.0.a", "h.1.a", "h.0.b", "h.1.b"], ["h.0–1.{a, b}"]),
        (["h.0.a", "h.1.a", "final"], ["h.0–1.a", "final"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0–1.b.0–1"]),
        (["a.0.b.0", "a.1.b.1"], ["a.0.b.0", "a.1.b.1"]),
        (["net#add:0", "net#add:1"], ["net#add:0–1"]),
        (["conv1", "conv2"], ["conv1", "conv2"]),
        (["h.00", "h.01"], ["h.{00, 01}"]),
        (["."], ["."]),
        ([], []),
    ],
)
def test_paths_that_differ_in_numbers_become_ranges(paths: list[str], expected: list[str]) -> None:
    assert ranges(paths) == expected


def expanded(text: str) -> set[str]:
    """Every path that a range with numbers stands for, the reverse of `ranges` for dotted paths."""
    parts = []
    for part in text.split("."):
        values: list[str] = []
        for piece in part.split(","):
            first, _, last = piece.partition("–")
            values += map(str, range(int(first), int(last or first) + 1)) if first.isdigit() else [piece]
        parts.append(values)
    return {".".join(choice) for choice in itertools.product(*parts)}


@given(st.sets(st.tuples(st.integers(0, 6), st.sampled_from("ab"), st.integers(0, 6)), min_size=1))
def test_ranges_cover_what_was_given_and_nothing_else(numbers: set[tuple[int, str, int]]) -> None:
    paths = {f"{name}.{first}.m.{last}.norm" for first, name, last in numbers}
    texts = ranges(sorted(paths))
    assert set().union(*map(expanded, texts)) == paths
    assert sum(len(expanded(text)) for text in texts) == len(paths)


@given(st.text(alphabet="ab.", max_size=60), st.integers(1, 40))
def test_shortened_paths_fit_and_keep_their_end(path: str, width: int) -> None:
    short = shorten(path, width)
    assert len(short) <= max(width, 1)
    if len(path) <= width:
        assert short == path
    else:
        head, tail = short.split("…")
        assert path.startswith(head)
        assert path.endswith(tail)


def test_whole_components_are_kept_where_they_fit() -> None:
    path = "model.vision_tower.encoder.layers.3.self_attn.q_norm"
    assert shorten(path, 31) == "model…layers.3.self_attn.q_norm"
    assert shorten(path, 30) == "model…3.self_attn.q_norm"
    assert shorten("/home/me/models/small/model.Q4.gguf", 24) == "…/small/model.Q4.gguf"


def test_what_does_not_fit_is_counted() -> None:
    names = ["one", "b.two", "c.three", "d.four", "e.five", "f.six"]
    assert joined(names, 20, most=2) == "one, b.two and 4 more"
