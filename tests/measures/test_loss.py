"""The loss is found by name in whatever holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from normprobe.errors import InputError
from normprobe.measures.loss import loss_of
from normprobe.records import Anatomy

IDS = torch.tensor([[0, 2, 1]])


@dataclass
class Output:
    x: Any = None
    logits: Tensor | None = None
    loss: Tensor | None = None


def test_own_loss_of_a_dataclass() -> None:
    own = torch.tensor(3.0, requires_grad=True)
    value, name = loss_of(Output(torch.ones(2), loss=own), (), Anatomy(), None)
    assert (float(value.detach()), name) == (3.0, "the model's own")


def test_logits_of_a_dataclass() -> None:
    output = Output(torch.ones(3, requires_grad=True), torch.zeros(1, 3, 4, requires_grad=True))
    value, name = loss_of(output, {"input_ids": IDS}, Anatomy(), None)
    assert name == "cross-entropy of the next token"
    assert float(value.detach()) == pytest.approx(torch.log(torch.tensor(4.0)).item())


def test_mean_square_of_what_a_dataclass_holds() -> None:
    value, name = loss_of(Output([torch.ones(2), torch.full((2,), 3.0, requires_grad=True)]), (), Anatomy(), None)
    assert (float(value.detach()), name) == (9.0, "mean square of the first output")


def test_nothing_to_differentiate() -> None:
    with pytest.raises(InputError, match="no output of the model depends on a parameter"):
        loss_of(Output(torch.ones(2)), (), Anatomy(), None)
