"""The same model has the same Anatomy on any device and dtype, with gradients on, and under autocast."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from tests.anatomy.reading import named
from tests.models import MODELS, to_meta

# What the dtype and the device decide, not the architecture.
OF_THE_DTYPE = {"reduction", "weight_multiply", "evidence", "device", "eps", "dtype"}
EVERY = pytest.mark.parametrize("name", MODELS)


def facts(anatomy: Any) -> Any:
    """The Anatomy as plain data without what the dtype decides."""

    def kept(item: Any) -> Any:
        if isinstance(item, dict):
            return {k: kept(v) for k, v in item.items() if k not in OF_THE_DTYPE}
        return [kept(v) for v in item] if isinstance(item, list) else item

    return kept(anatomy.model_dump(mode="json"))


def read(model: nn.Module, inputs: Any, **settings: Any) -> Any:
    return normprobe.probe(model, inputs, level="structure", **settings).anatomy


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    return inputs.to(dtype) if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() else inputs


def differences(found: Any, expected: Any, rel: float = 1e-6, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two trees differ, by place; floats by more than `rel`."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(f"{place}.{k}", found[k], expected[k]) for k in found]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        close = isinstance(found, float) and found == pytest.approx(expected, rel=rel)
        return {} if close or found == expected else {place: (found, expected)}
    return {k: v for p, a, b in pairs for k, v in differences(a, b, rel, p).items()}


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, inputs = MODELS[name]()
    found = read(model.to(dtype), cast(inputs, dtype))
    assert differences(facts(found), facts(named(name)), rel=torch.finfo(dtype).eps + 1e-6) == {}
    assert [n.eps for n in found.norms] == [pytest.approx(n.eps, rel=2e-2) for n in named(name).norms]


@EVERY
def test_meta(name: str) -> None:
    model, inputs = MODELS[name]()
    found = read(to_meta(model), inputs)
    differing = differences(facts(found), facts(named(name)))
    # a product with a tensor of three axes is another operation there
    products = re.compile(r"\.weights\[\d+\]\.site\.op|.*\.entry\.site\.op")
    differing = {k: v for k, v in differing.items() if not products.fullmatch(k)}
    if name == "gemma2":  # its embedding scale is held in a buffer, which has no value there
        assert differing.pop(".streams[0].input_multiplier")[0] is None
    assert differing == {}
    assert [n.eps for n in found.norms] == [pytest.approx(n.eps, rel=1e-2) for n in named(name).norms]


@EVERY
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_grad_modes(name: str, context: Callable[[], Any]) -> None:
    model, inputs = MODELS[name]()
    with context():
        found = read(model, inputs)
    assert differences(facts(found), facts(named(name))) == {}
    assert [n.eps for n in found.norms] == [n.eps for n in named(name).norms]


@EVERY
def test_inference_mode(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.inference_mode():
        found = read(model, inputs)
    assert differences(facts(found), facts(named(name))) == {}


@EVERY
def test_autocast(name: str) -> None:
    model, inputs = MODELS[name]()
    found = read(model, inputs, autocast="bfloat16")
    assert differences(facts(found), facts(named(name))) == {}


@EVERY
def test_autocast_around_the_call(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.autocast("cpu", torch.bfloat16):
        found = read(model, inputs)
    assert differences(facts(found), facts(named(name))) == {}


@pytest.mark.parametrize("name", ["decoder_pre", "gpt2", "llama"])
def test_two_readings_are_equal(name: str) -> None:
    model, inputs = MODELS[name]()
    assert read(model, inputs) == read(model, inputs) == named(name)
