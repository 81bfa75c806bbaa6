"""Inputs to arguments; no key-value cache where the model accepts that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normprobe.capture.invoke import invoke, split
from normprobe.errors import InputError

X, Y = torch.ones(2), torch.zeros(2)


class Echo(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Cached(nn.Module):
    def forward(self, x: Any, use_cache: bool = True) -> bool:
        return use_cache


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, Y], (X, Y), {}),
        ({"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (({"x": X},), ({"x": X},), {}),
        ((), (), {}),
    ],
)
def test_how_inputs_are_passed(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found_args, found_kwargs = invoke(Echo(), inputs)
    assert [id(a) for a in found_args if a is X or a is Y] == [id(a) for a in args if a is X or a is Y]
    assert len(found_args) == len(args)
    assert {k: id(v) for k, v in found_kwargs.items()} == {k: id(v) for k, v in kwargs.items()}


def test_mapping_of_another_class_is_a_mapping() -> None:
    from transformers import BatchEncoding

    assert invoke(Echo(), BatchEncoding({"x": X}))[1] == {"x": X}


def test_other_values_are_the_only_argument() -> None:
    array = np.ones(2)
    assert split(array) == ((array,), {})


def test_inputs_of_the_caller_are_not_changed() -> None:
    inputs = {"x": X}
    invoke(Cached(), inputs)
    assert inputs.keys() == {"x"}


def test_no_cache_where_the_model_accepts_that() -> None:
    assert invoke(Cached(), (X,)) is False
    assert invoke(Cached(), {"x": X}) is False


def test_what_the_caller_says_of_the_cache_stays() -> None:
    assert invoke(Cached(), {"x": X, "use_cache": True}) is True


def test_model_without_that_argument_is_not_given_it() -> None:
    assert invoke(Echo(), (X,))[1] == {}


def test_forward_without_a_signature() -> None:
    model = Echo()
    model.forward = torch.relu  # written in C
    assert torch.equal(invoke(model, torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_no_inputs_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(InputError, match="no inputs were given\n  try: pass inputs= a tensor, a tuple or a dict"):
        split(None)
