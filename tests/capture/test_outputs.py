"""Tensors in whatever a forward returns, with their places."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from normprobe.capture.outputs import named_tensors

X, Y, Z = torch.zeros(1), torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Plain:
    logits: Tensor
    more: Any = None
    unset: Tensor = field(init=False)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (X, {"output": X}),
        ((X, [Y]), {"0": X, "1.0": Y}),
        ({"a": X, "b": {"c": (Y,)}}, {"a": X, "b.c.0": Y}),
        (OrderedDict(b=X, a=Y), {"b": X, "a": Y}),
        ({3: X}, {"3": X}),
        (Pair(X, {"y": Y}), {"left": X, "right.y": Y}),
        (
            BaseModelOutput(X, hidden_states=(Y, Z)),
            {"last_hidden_state": X, "hidden_states.0": Y} | {"hidden_states.1": Z},
        ),
        (Plain(X, [Plain(Y), Pair(Z, 1)]), {"logits": X, "more.0.logits": Y, "more.1.left": Z}),
        ({"inner": Plain(X)}, {"inner.logits": X}),
        (({X},), {"0.0": X}),
        (torch.return_types.max((X, Y)), {"0": X, "1": Y}),
        ((X, X), {"0": X, "1": X}),
    ],
)
def test_places(output: Any, expected: dict[str, Tensor]) -> None:
    found = named_tensors(output)
    assert [name for name, _ in found] == list(expected)
    assert all(tensor is expected[name] for name, tensor in found)


@pytest.mark.parametrize("output", [None, 3, "text", (), {}, [None, {"a": 1}], Plain, object()])
def test_nothing_to_open(output: Any) -> None:
    assert named_tensors(output) == []


def test_what_is_registered_with_pytree_is_opened() -> None:
    class Registered:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    torch.utils._pytree.register_pytree_node(Registered, lambda r: ([Plain(r.x)], None), lambda c, _: Registered(c[0]))
    [(name, tensor)] = named_tensors({"kept": Registered(X)})
    assert name == "kept.0.logits"
    assert tensor is X


def test_a_dataclass_that_holds_itself_ends() -> None:
    plain = Plain(X)
    plain.more = [plain]
    assert [name for name, _ in named_tensors(plain)] == ["logits"]
