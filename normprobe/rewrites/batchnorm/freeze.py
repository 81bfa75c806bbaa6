"""Batch norms keep to their stored statistics, in train mode too."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Site, Sites, Survey, module_at
from normprobe.rewrites.batchnorm.held import batch_norm_sites, held_of
from normprobe.rewrites.swap import Layer, lay

_IN_TRAIN_MODE = "in train mode the function changes: stored statistics in place of the batch's"


@final
class Frozen(Layer):
    """Runs the forward below as in eval mode, whatever the module's train flag says."""

    NOTE = "frozen (normprobe)"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward in eval mode."""
        training, self.__dict__["training"] = self.__dict__["training"], False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["training"] = training


@final
@dataclass(frozen=True)
class FreezeBatchNorm(ChosenRewrite):
    """Batch norms use their stored statistics in train mode too and leave them as they are.

    Exact in eval mode, bit for bit. For fine-tuning with small batches or data unlike the first: the statistics stay
    those of the checkpoint, also after `model.train()`. Gains and offsets go on learning (He et al. 2020, Momentum
    Contrast, sec. 4.2, and detection models freeze them so).

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "batch norms keep to their stored statistics in train mode too"

    def sites(self, survey: Survey) -> Sites:
        """One site for every batch norm whose statistics move."""

        def site(norm: NormSite) -> Site | str | None:
            held = None if norm.frozen else held_of(survey, norm)
            return held if held is None or isinstance(held, str) else Site(norm.path, "its statistics stay")

        found = batch_norm_sites(survey, self.only, site)
        return Sites(found.sites, found.refused, (_IN_TRAIN_MODE,) if found.sites else ())

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Lay `Frozen` over the norm."""
        lay(module_at(model, site.path), Frozen, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as a frozen batch norm."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.kind != "batchnorm" or not norm.frozen:
                what, found = (
                    f"FreezeBatchNorm did not take hold at {site.path}",
                    "no norm" if norm is None else norm.kind,
                )
                raise RewriteError(what, expected="batchnorm, frozen", found=found)
