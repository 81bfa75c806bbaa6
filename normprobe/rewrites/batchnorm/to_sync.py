"""Batch norms share their statistics between processes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Site, Sites, Survey, module_at
from normprobe.rewrites.batchnorm.held import batch_norm_sites, held_of


@final
@dataclass(frozen=True)
class ToSyncBatchNorm(ChosenRewrite):
    """Torch's batch norms become `nn.SyncBatchNorm`: one statistic over the batches of all processes.

    Exact in eval mode and with one process. Unlike `nn.SyncBatchNorm.convert_sync_batchnorm` the module objects stay,
    and with them hooks, optimisers and references. In train mode the processes have to run on GPUs, as torch has it.

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "batch norms share their statistics between processes"

    def sites(self, survey: Survey) -> Sites:
        """One site for every batch norm of torch's that is not synchronised."""

        def site(norm: NormSite) -> Site | str | None:
            module = module_at(survey.model, norm.path) if norm.module else None
            if norm.frozen or isinstance(module, nn.SyncBatchNorm):
                return None
            if not isinstance(module, _BatchNorm):
                return "it is no batch norm of torch: how its statistics could be shared is not known"
            if type(module).forward is not _BatchNorm.forward:
                return "its class has a forward of its own, which would be lost"
            held = held_of(survey, norm)
            return held if isinstance(held, str) else Site(norm.path, "becomes nn.SyncBatchNorm")

        return batch_norm_sites(survey, self.only, site)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Give the module torch's class and the default group of processes."""
        module = module_at(model, site.path)
        module.__dict__["process_group"] = None
        module.__class__ = nn.SyncBatchNorm

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as a batch norm of torch's synchronised class."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.kind != "batchnorm" or norm.class_name != nn.SyncBatchNorm.__name__:
                what = f"ToSyncBatchNorm did not take hold at {site.path}"
                raise RewriteError(what, expected="SyncBatchNorm", found="no norm" if norm is None else norm.class_name)
