"""Skips of branches that are left out or taken behind a norm (2xx, 3xx)."""

from __future__ import annotations

from torch import nn

from normprobe.records import Anatomy, Branch
from normprobe.records.anatomy import LAYER_KINDS
from tests.faults.edits import at
from tests.faults.fault import Fault, Site, fault
from tests.faults.operators.branches import with_counterparts
from tests.faults.operators.placement import all_normed_before, taken_behind


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


def kinds(anatomy: Anatomy) -> list[Site]:
    """The kinds of branches of streams with several, all normed at their input, in blocks one like the other."""
    found = []
    for site in all_normed_before(anatomy):
        held = {tuple(b.kind for b in block) for block in site.detail.blocks()}
        if len(held) == 1 and len(set(*held)) > 1:
            found += [Site(site.path, (site.detail, kind)) for kind in sorted(set(*held))]
    return found


@fault("the skip of one kind of branch taken behind its norm", "NP204", "note", kinds)
def skips_of_one_kind(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    stream, kind = site.detail
    for branch in stream.branches:
        if branch.kind == kind:
            taken_behind(model, branch.pre_norm, branch)


ALL: tuple[Fault, ...] = (no_skip, skips_of_one_kind)
