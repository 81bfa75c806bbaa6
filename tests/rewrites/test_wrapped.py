"""Quantised parameters say that they hold floats: no rewrite changes one, and the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normprobe.rewrites import AddQKNorm, FoldGains, Initialise, Rewrite, ScaleResidual, SetEps, ToRMSNorm, make_plan
from tests.models import gpt2, llama


class Int8(Tensor):
    """Eight bits and a scale, which report float32."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Int8:
        return Int8(parts["data_"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8(args[0].data_, args[0].scale)
        args, kwargs = tree_map_only(Int8, lambda t: t.data_.to(t.scale.dtype) * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


def int8(weight: Tensor) -> nn.Parameter:
    scale = weight.abs().amax() / 127
    return nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)


def quantised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = int8(module.weight.detach())
    return model


@pytest.mark.parametrize(
    "rewrite", [FoldGains(), Initialise(), ScaleResidual(), AddQKNorm()], ids=lambda each: each.name
)
def test_sites_with_quantised_weights_are_refused(rewrite: Rewrite) -> None:
    model, inputs = llama()
    found = make_plan(quantised(model), [rewrite], inputs).steps[0][1]
    assert any("is a Int8, which stores its numbers in a way of its own" in each.why for each in found.refused)
    kinds = {name: type(p) for name, p in model.named_parameters()}
    assert not any(kinds[name] is Int8 for site in found.sites for name in site.touched)


def test_what_holds_together_alone_is_refused_as_a_whole() -> None:
    model, inputs = gpt2()
    block = model.transformer.h[0].mlp.c_proj
    scale = block.weight.detach().abs().amax() / 127
    block.weight = nn.Parameter(
        Int8((block.weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False
    )
    found = make_plan(model, [ToRMSNorm()], inputs).steps[0][1]
    assert not found.sites
    assert any("transformer.h.0.mlp.c_proj.weight is a Int8" in each.why for each in found.refused)


def test_norms_beside_quantised_weights_can_change() -> None:
    model, inputs = llama()
    plan = make_plan(quantised(model), [SetEps(eps=1e-3)], inputs).apply()
    assert len(plan.steps[0][1].sites) == 5
    plan.undo()
