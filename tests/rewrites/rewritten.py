"""Each rewrite with its settings on a tiny model that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from normprobe.rewrites import (
    AddFinalNorm,
    AddOutputNorms,
    AddQKNorm,
    Fixup,
    FoldBatchNorm,
    FoldGains,
    FreezeBatchNorm,
    FuseNorms,
    Initialise,
    PlainWeights,
    Plan,
    QKClip,
    RemoveNorms,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    SetEps,
    StoreGains,
    ToDyT,
    ToGroupNorm,
    ToPostNorm,
    ToRMSNorm,
    ToSyncBatchNorm,
    UpcastNorms,
    make_plan,
)
from tests.models import Built, gpt2, llama
from tests.norms import zoo

EVERYWHERE: dict[str, Rewrite] = {
    "SetEps": SetEps(eps=1e-3),
    "FoldGains": FoldGains(),
    "AddOutputNorms": AddOutputNorms(),
    "ToDyT": ToDyT(),
    "ToPostNorm-deepnorm": ToPostNorm(deepnorm=True),
    "ScaleResidual-layerscale": ScaleResidual("layerscale"),
    "ScaleResidual-skipinit": ScaleResidual("skipinit", 0.5, preserve=False),
    "Fixup": Fixup(),
    "AddQKNorm": AddQKNorm(),
    "AddQKNorm-layernorm": AddQKNorm(kind="layernorm", start="calibrated"),
    "AddQKNorm-l2norm": AddQKNorm(kind="l2norm", shared=True),
    "AddQKNorm-full": AddQKNorm(axis="full", start="distilled", steps=3),
    "QKClip": QKClip(limit=0.2),
    "Initialise": Initialise(),
    "Reparametrise": Reparametrise(),
    "Reparametrise-standardised": Reparametrise("weight_standardization"),
}


def no_final(built: Callable[[], Built]) -> Callable[[], Built]:
    """The same model without its final norm."""

    def bare() -> Built:
        model, inputs = built()
        (model.transformer if hasattr(model, "transformer") else model.model)._modules[_final(model)] = nn.Identity()
        return model, inputs

    return bare


def _final(model: nn.Module) -> str:
    return "ln_f" if hasattr(model, "transformer") else "norm"


def doubled() -> Built:
    """A Llama whose final norm is followed by another one."""
    model, inputs = llama()
    model.model.norm = nn.Sequential(model.model.norm, nn.RMSNorm(32, eps=1e-6))
    return model, inputs


def one_plus() -> Built:
    """A Llama that multiplies by 1 + w."""
    return _with_norms(lambda: zoo.RMSNorm(one_plus=True))


def narrow() -> Built:
    """A Llama whose norms take their statistic in the dtype of their input."""
    return _with_norms(lambda: zoo.RMSNorm(upcast=False))


def _with_norms(made: Callable[[], nn.Module]) -> Built:
    model, inputs = llama()
    for layer in model.model.layers:
        layer.input_layernorm = made()
    return model.eval(), inputs


def computed() -> Built:
    """A Llama with weight norm."""
    model, inputs = llama()
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.mlp.up_proj)
    return model, inputs


HERE: dict[str, tuple[Callable[[], Built], Rewrite]] = {
    "UpcastNorms": (narrow, UpcastNorms()),
    "FuseNorms-llama": (llama, FuseNorms()),
    "StoreGains-weight": (one_plus, StoreGains("weight")),
    "StoreGains-one_plus-llama": (llama, StoreGains("one_plus_weight")),
    "AddFinalNorm-llama": (no_final(llama), AddFinalNorm()),
    "AddFinalNorm-gpt2": (no_final(gpt2), AddFinalNorm()),
    "RemoveNorms": (doubled, RemoveNorms()),
    "ToRMSNorm-gpt2": (gpt2, ToRMSNorm()),
    "ToRMSNorm-untie": (gpt2, ToRMSNorm(tied="untie")),
    "ToRMSNorm-plain": (gpt2, ToRMSNorm(exact=False)),
    "PlainWeights": (computed, PlainWeights()),
}

PACKED = "AddQKNorm", "ToPostNorm-deepnorm", "ScaleResidual-layerscale", "Fixup", "FoldGains", "QKClip", "Reparametrise"
CASES: dict[str, tuple[Callable[[], Built], Rewrite]] = {
    f"{name}-llama": (llama, one) for name, one in EVERYWHERE.items()
}
CASES |= {f"{name}-gpt2": (gpt2, EVERYWHERE[name]) for name in PACKED} | HERE


class Block(nn.Module):
    """x + bn(conv(relu(bn(conv(x)))))."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return found


def cnn() -> Built:
    """Blocks whose statistics are those of some data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(), Block(), nn.Flatten(), nn.Linear(288, 5))
    with torch.no_grad():
        for _ in range(20):
            model(2 * torch.randn(16, 3, 8, 8) + 1)
    return model.eval(), 2 * torch.randn(4, 3, 8, 8) + 1


PICTURES: dict[str, tuple[Callable[[], Built], Rewrite]] = {
    each.name: (cnn, each)
    for each in (
        FreezeBatchNorm(),
        ToSyncBatchNorm(),
        ToGroupNorm(),
        FoldBatchNorm(),
    )
}


def rewritten(name: str) -> tuple[nn.Module, Any, Plan]:
    """The model of a case with its rewrite applied, made anew."""
    built, rewrite = (CASES | PICTURES)[name]
    model, inputs = built()
    return model, inputs, make_plan(model, [rewrite], inputs).apply()
