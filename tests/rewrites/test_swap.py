"""Layers over a module's class: stacked, taken away in any order, and refused."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites.swap import Layer, lay, why_not


class Doubling(Layer):
    NOTE = "doubled"

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adding(Layer):
    NOTE = "one more"

    def forward(self, x: Tensor) -> Tensor:
        return 1 + super().forward(x)


def stacked() -> tuple[nn.Module, ExitStack, ExitStack]:
    module, first, second = nn.Identity(), ExitStack(), ExitStack()
    lay(module, Doubling, "here", first)
    lay(module, Adding, "here", second)
    return module, first, second


def value(module: nn.Module) -> float:
    return float(module(torch.tensor(3.0)))


def test_layers_stack_and_are_copied() -> None:
    module, _, _ = stacked()
    assert value(module) == 7
    assert value(copy.deepcopy(module)) == 7
    assert repr(module) == "Identity(doubled, one more)"


@pytest.mark.parametrize("lower_first", [True, False])
def test_any_of_them_is_taken_away_alone(lower_first: bool) -> None:
    module, first, second = stacked()
    (first if lower_first else second).close()
    assert value(module) == (4 if lower_first else 6)
    (second if lower_first else first).close()
    assert type(module) is nn.Identity


def test_a_class_that_was_changed_since_is_an_error() -> None:
    module, first, _ = stacked()
    module.__class__ = nn.Identity
    with pytest.raises(RewriteError, match=r"cannot undo the rewrite of here(.|\n)*found: Identity > Module"):
        first.close()


def test_a_module_whose_forward_is_hidden_is_refused() -> None:
    module = nn.Identity()
    assert why_not(module) is None
    module.forward = module.forward
    assert "replaced on the instance" in (why_not(module) or "")
