"""Attributes go to plain values and back."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from normprobe.structure.restore import decoded
from normprobe.structure.values import Encoder

numbers = st.integers(-3, 5)
runs = st.builds(lambda start, length: tuple(range(start, start + length)), numbers, st.integers(0, 5))
heads = st.builds(
    lambda first, length, apart, count: tuple(
        tuple(range(first + apart * n, first + apart * n + length)) for n in range(count)
    ),
    *(numbers, st.integers(0, 5), numbers, st.integers(0, 5)),
)
plain = st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
anything = st.recursive(
    plain | runs | heads,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


@given(anything)
def test_every_value_comes_back_by_way_of_json(value: Any) -> None:
    back = decoded(json.loads(json.dumps(Encoder().encoded(value, "here"))), {}, {})
    assert back == value
    assert repr(back) == repr(value)


def test_heads_are_written_down_by_their_number() -> None:
    every = tuple(tuple(range(32 * n, 32 * n + 32)) for n in range(64))
    assert Encoder().encoded(every, "here") == {"ranges": [0, 32, 32, 64]}
    assert "tuple" in Encoder().encoded((*every, tuple(range(5, 37))), "here")
