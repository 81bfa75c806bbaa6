"""Norms of one class with other settings are identified apart; those with the same settings once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from normprobe.anatomy.norm_sites import modules
from normprobe.anatomy.norm_sites.alike import settings
from tests.anatomy.reading import anatomy_of
from tests.models import WIDTH, decoder


class Cast(nn.Module):
    """RMSNorm whose cast back stands before or behind the gain, which float32 cannot tell apart."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.weight, self.late = nn.Parameter(torch.ones(WIDTH)), late

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight.float() * y).to(x.dtype) if self.late else self.weight * y.to(x.dtype)


def test_the_cast_of_each_norm_is_its_own() -> None:
    model, inputs = decoder("pre", norm=partial(Cast, False))
    assert {n.weight_multiply for n in anatomy_of(model, inputs).norms} == {"after_cast"}
    model.get_submodule("final").late = True  # type: ignore[assignment]
    told = {n.path: n.weight_multiply for n in anatomy_of(model, inputs).norms}
    assert told.pop("final") == "before_cast"
    assert set(told.values()) == {"after_cast"}


def test_norms_that_are_alike_are_identified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[nn.Module] = []
    identify = modules.identify_module

    def counted(module: nn.Module, *args: object, **kwargs: object) -> object:
        runs.append(module)
        return identify(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(modules, "identify_module", counted)
    assert len(anatomy_of(*decoder("pre", norm=partial(Cast, False))).norms) == 7
    assert len(runs) == 1


def _other_function(module: nn.Module) -> None:
    module.forward = MethodType(lambda self, x: x, module)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "late", 0),
        lambda m: setattr(m, "steps", [1, {"eps": (2.0,)}]),
        lambda m: setattr(m, "table", torch.ones(2)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))),
        lambda m: m.add_module("inner", nn.Dropout(0.1)),
        lambda m: m.register_parameter("bias", None),
        _other_function,
    ],
    ids=["number", "container", "tensor", "dtype", "module", "parameter", "forward"],
)
def test_another_setting_is_seen(change: Callable[[nn.Module], None]) -> None:
    module = Cast(False)
    change(module)
    assert settings(module) != settings(Cast(False))


def test_values_names_and_hooks_are_no_settings() -> None:
    module = Cast(False)
    module.weight.data.mul_(3)
    module.register_forward_hook(lambda *_: None)
    module.steps, other = [1, {2, 3}], Cast(False)
    other.steps = [1, {3, 2}]
    for each in (module, other):
        each.forward = MethodType(Cast.forward, each)  # type: ignore[method-assign]
    assert settings(module) == settings(other)
