"""Inputs to arguments; no key-value cache where the model accepts that."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.invoke import invoke, split
from normprobe.errors import InputError

X, Y = torch.ones(2), torch.zeros(2)


class Echo(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Cached(nn.Module):
    def forward(self, x: Any, use_cache: bool = True) -> bool:
        return use_cache


class Unsized(Echo):
    def __len__(self) -> int:
        raise TypeError("it has no length")


def test_what_runs_in_the_place_of_a_model_need_not_be_true() -> None:
    (given,), options = invoke(Cached(), X, run=Unsized())
    assert torch.equal(given, X)
    assert options == {"use_cache": False}


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
    assert form(found_args) == form(args)
    assert form(found_kwargs) == form(kwargs)


def form(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.tolist, value)


def test_mapping_of_another_class_is_a_mapping() -> None:
    from transformers import BatchEncoding

    assert form(invoke(Echo(), BatchEncoding({"x": X}))[1]) == {"x": [1.0, 1.0]}


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


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_every_call_has_its_own_copy_of_tensors_and_of_what_holds_them() -> None:
    x, array, box = torch.ones(2), np.ones(2), Box(torch.ones(2))
    inputs = {"x": x, "nest": [x, {"y": x * 1}], "array": array, "box": box}
    first, second = (invoke(Echo(), inputs)[1] for _ in range(2))
    for found in (first, second):
        assert found["x"] is found["nest"][0], "one tensor in two places stays one"
        for tensor in (found["x"], found["nest"][1]["y"], found["box"].x):
            assert torch.equal(tensor, torch.ones(2))
            tensor += 1
        found["array"] += 1
        found["nest"].append(1)
    assert form(inputs["nest"]) == [[1.0, 1.0], {"y": [1.0, 1.0]}]
    assert box.x.tolist() == x.tolist() == array.tolist() == [1.0, 1.0]


def test_cache_of_the_caller_does_not_grow() -> None:
    from transformers import DynamicCache

    class Growing(nn.Module):
        def forward(self, x: Tensor, past: DynamicCache) -> int:
            past.update(x, x, 0)
            return past.get_seq_length()

    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert [invoke(Growing(), (torch.ones(1, 2, 5, 4), cache)) for _ in range(2)] == [8, 8]
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0)[::2],
        torch.arange(100.0)[50:52],
        torch.ones(1, 3).expand(4, 3),
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        torch.tensor([[True]]),
    ],
)
def test_copies_of_tensors(tensor: Tensor) -> None:
    copy = invoke(Echo(), (tensor,))[0][0]
    assert copy is not tensor
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(copy.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided and tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_a_slice_does_not_copy_all_it_was_cut_from() -> None:
    copy = invoke(Echo(), (torch.zeros(10_000)[:2],))[0][0]
    assert copy.untyped_storage().nbytes() == 8


def test_views_of_one_memory_share_it_in_the_copy_too() -> None:
    x = torch.zeros(6)
    left, right = invoke(Echo(), (x[:4], x[2:]))[0]
    left += 1
    assert right.tolist() == [1, 1, 0, 0]
    assert x.tolist() == [0.0] * 6


def test_meta_tensors_are_copied_without_values() -> None:
    copy = invoke(Echo(), (torch.ones(2, 3, device="meta"),))[0][0]
    assert copy.is_meta
    assert copy.shape == (2, 3)


@pytest.mark.parametrize("leaf", [True, False])
def test_copies_have_no_history(leaf: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    x = x if leaf else x * 2
    copy = invoke(Echo(), ([x],))[0][0][0]
    assert copy.grad_fn is None
    assert copy.requires_grad is leaf
    if leaf:
        copy.sum().backward()
        assert x.grad is None


def test_parts_of_the_model_stay_themselves() -> None:
    model = Echo()
    model.inner = nn.Linear(2, 2)
    found = invoke(model, (model.inner, model.inner.weight))[0]
    assert found[0] is model.inner
    assert found[1] is model.inner.weight


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(InputError, match=r"^the argument lock cannot be copied") as caught:
        invoke(Echo(), {"lock": [threading.Lock()]})
    assert "found: list: TypeError: cannot pickle" in str(caught.value)
