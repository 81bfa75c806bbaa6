"""The loss is found by name in whatever holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe import probe
from normprobe.errors import InputError
from normprobe.measures.loss import loss_of
from normprobe.records import Anatomy
from tests.measures.models import anatomy_of, t5
from tests.models import bert, gpt2

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


def test_a_model_that_sees_the_next_token_is_asked_for_each_token_itself() -> None:
    for (model, inputs), expected in (
        (bert(), "cross-entropy of every token itself"),
        (gpt2(), "cross-entropy of the next token"),
    ):
        found = probe(model, inputs, level="backward").gradients
        assert found.loss.startswith(expected)
        with torch.no_grad():
            logits, ids = model(**inputs).logits, inputs["input_ids"]
        ahead = 0 if "itself" in expected else 1
        value = F.cross_entropy(logits[:, : ids.shape[1] - ahead].flatten(0, 1), ids[:, ahead:].flatten())
        assert found.value == pytest.approx(float(value), rel=1e-5)


def test_an_encoder_before_a_causal_decoder_does_not_count() -> None:
    case = t5()
    assert not next(site.causal for site in anatomy_of(case.model, case.inputs).attention)
    assert probe(case.model, case.inputs, level="backward").gradients.loss == "cross-entropy of the next token"
