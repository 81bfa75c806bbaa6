"""Skips of single branches that are left out (3xx)."""

from __future__ import annotations

from torch import nn

from normprobe.records import Anatomy, Branch
from normprobe.records.anatomy import LAYER_KINDS
from tests.faults.edits import at
from tests.faults.fault import Fault, Site, fault
from tests.faults.operators.branches import with_counterparts


def skips(anatomy: Anatomy) -> list[Site]:
    """Branches like others of their stream, each alone at its add and behind a norm of its own, with nothing in place
    of the skip but the trunk."""
    return [
        Site(site.detail[1].block, site.detail)
        for site in with_counterparts(anatomy)
        if _plain(site.detail[1]) and sum(b.add == site.detail[1].add for b in site.detail[0].branches) == 1
    ]


def _plain(branch: Branch) -> bool:
    free = branch.branch_scale.kind == "none" and branch.skip_scale == 1.0 and branch.skip == "identity"
    return branch.apart and not branch.parallel and branch.kind in LAYER_KINDS and free


@fault("one branch that is not added to the stream but put in its place", "NP309", "warning", skips)
def no_skip(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    branch = site.detail[1]
    at(model, branch.add, lambda run, *args, **kwargs: args[1 - branch.trunk].clone())


ALL: tuple[Fault, ...] = (no_skip,)
