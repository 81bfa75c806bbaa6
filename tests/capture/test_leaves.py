"""Tensors found and replaced in nested arguments give what torch's pytree gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from normprobe.capture.leaves import replaced, tensors

Pair = namedtuple("Pair", "a b")
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
leaves = st.one_of(plain, st.builds(torch.ones, st.integers(0, 3)), st.just(nn.Parameter(torch.zeros(1))))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=8,
)


@given(trees)
def test_tensors_are_those_of_pytree_in_order(tree: Any) -> None:
    expected = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    found = tensors(tree)
    assert len(found) == len(expected)
    assert all(a is b for a, b in zip(found, expected, strict=True))


@given(trees)
def test_replaced_is_pytrees_map(tree: Any) -> None:
    def shape(tensor: Tensor) -> tuple[str, int]:
        return ("tensor", tensor.numel())

    made, expected = replaced(tree, shape), pytree.tree_map_only(Tensor, shape, tree)
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_model_outputs_are_opened(kind: Any) -> None:
    states = kind([torch.zeros(1), torch.ones(2)])
    output = BaseModelOutput(last_hidden_state=torch.zeros(3), hidden_states=states)
    assert [t.numel() for t in tensors({"out": output})] == [3, 1, 2]
