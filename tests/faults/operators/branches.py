"""Norms of branches: missing, behind in place of before, twice, or built and not called (2xx)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy
from tests.faults.edits import Twice, at, module_at, norm_at, passing, replace, uncalled
from tests.faults.fault import Fault, Severity, Site, fault
from tests.faults.operators.placement import a_norm, blocks, inside
from tests.faults.written import Form, along_features, form_of, fresh, written


def lacking(anatomy: Anatomy, site: Site) -> Severity:
    """A warning where the branch has no other norm and no factor in its place, and is known to be a layer."""
    branch = site.detail[1]
    free = branch.branch_scale.kind == "none" and branch.skip_scale == 1.0 and branch.skip == "identity"
    whole = branch.kind not in ("conv", "other")
    return "warning" if free and whole and branch.placement in ("pre", "post") else "note"


def with_counterparts(anatomy: Anatomy) -> list[Site]:
    """Norms before branches of which the stream has three or more alike, and which are that branch's alone."""
    found = []
    for stream in anatomy.streams:
        for place, branch in enumerate(stream.branches):
            alike = [b for b in stream.branches if (b.kind, b.placement) == (branch.kind, branch.placement)]
            one_block = len({tuple(b.kind for b in stream.branches if b.block == a.block) for a in alike}) == 1
            norm = anatomy.norm(branch.pre_norm or "")
            own = norm is not None and norm.module and norm.executions == 1
            shared = sum(b.pre_norm == branch.pre_norm for b in stream.branches) > 1
            if inside(stream) and own and not shared and len(alike) > 2 and one_block and place:
                found.append(Site(branch.pre_norm or "", (stream, branch)))
    return found


@fault("the norm before one branch replaced by the identity", "NP206", lacking, with_counterparts)
def raw_branch(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    passing(model, site.path)


@fault(
    "the norm of one branch behind it instead of before it",
    "NP206",
    "note",
    lambda anatomy: [s for s in with_counterparts(anatomy) if s.detail[1].apart and s.detail[1].output_norm is None],
)
def norm_behind_branch(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held, branch = written(model, norm_at(anatomy, site.path)), site.detail[1]

    def add(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        operands[1 - branch.trunk] = held(operands[1 - branch.trunk])
        return run(*operands, **kwargs)

    passing(model, site.path)
    at(model, branch.add, add)


def before_branches(anatomy: Anatomy) -> list[Site]:
    known = {b.pre_norm for s in anatomy.streams for b in s.branches}
    return [site for site in along_features(anatomy) if site.path in known]


@fault("the norm before a branch twice", "NP207", "warning", before_branches)
def twice(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = module_at(model, site.path)
    replace(model, site.path, Twice(held, copy.deepcopy(held)))


@fault("the input of a branch normed again by hand", "NP207", "warning", before_branches)
def twice_inline(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = module_at(model, site.path)
    replace(model, site.path, Twice(held, Inline(form_of(norm_at(anatomy, site.path)))))


class Inline(nn.Module):
    """What a norm of this form does, and no gain."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.form.centred else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.form.eps)


def blocks_with_norms(anatomy: Anatomy) -> list[Site]:
    """Blocks of streams with a norm to copy."""
    found = []
    for stream in anatomy.streams:
        norm = a_norm(anatomy, stream)
        found += [] if norm is None else [Site(path, (stream, norm)) for path in blocks(stream)]
    return found


@fault("a norm that a block builds and never calls", "NP208", "warning", blocks_with_norms)
def idle(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    stream, norm = site.detail
    module_at(model, site.path).add_module("planted", fresh(model, stream.width, norm))


def called_modules(anatomy: Anatomy) -> list[Site]:
    known = {b.pre_norm for s in anatomy.streams for b in s.branches} | {
        b.output_norm for s in anatomy.streams for b in s.branches
    }
    once = [n for n in anatomy.norms if n.module and n.executions == 1 and n.path in known and n.path != "."]
    return [Site(n.path) for n in once if n.weight is not None and n.kind != "dyt"]  # the others leave no trace


@fault("the norm of a branch built and not called", "NP208", "warning", called_modules, also=("NP206",))
def uncalled_norm(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    uncalled(model, site.path)


def on_sums(anatomy: Anatomy) -> list[Site]:
    """Norms on the sums of post-norm streams of three blocks or more, each of which is one module called once."""
    found = []
    for stream in anatomy.streams:
        norms = [anatomy.norm(branch.post_norm or "") for branch in stream.branches]
        own = all(norm is not None and norm.module and norm.executions == 1 for norm in norms)
        alike = len({tuple(b.kind for b in stream.branches if b.block == path) for path in blocks(stream)}) == 1
        if stream.placement == "post" and own and alike and len(blocks(stream)) > 2:
            found += [Site(branch.post_norm or "", (stream, branch)) for branch in stream.branches]
    return found


@fault("the norm on one sum replaced by the identity", "NP206", lacking, on_sums)
def raw_sum(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    passing(model, site.path)


def beside_others(anatomy: Anatomy) -> list[Site]:
    """Such norms, and those before branches, of streams whose blocks have several kinds of branches."""
    found = [*on_sums(anatomy), *with_counterparts(anatomy)]
    return [
        site
        for site in found
        if lacking(anatomy, site) == "warning" and all(b.placement != "none" for b in site.detail[0].branches)
        if len({b.kind for b in site.detail[0].branches}) > 1 and not any(b.parallel for b in site.detail[0].branches)
    ]


@fault("the norms of one kind of branch replaced by the identity", "NP213", "warning", beside_others)
def raw_kind(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    stream, branch = site.detail
    for norm in {b.post_norm or b.pre_norm for b in stream.branches if b.kind == branch.kind}:
        passing(model, norm)


def with_inner_norms(anatomy: Anatomy) -> list[Site]:
    """Branches with norms inside, of which the stream has three or more with the same operations."""
    found = []
    for stream in anatomy.streams:
        for branch in stream.branches:
            norms = [anatomy.norm(path) for path in branch.inner_norms]
            own = all(norm is not None and norm.module and norm.executions == 1 for norm in norms)
            same = (branch.kind, branch.recipe, len(norms))
            alike = [b for b in stream.branches if (b.kind, b.recipe, len(b.inner_norms)) == same]
            if norms and own and len(alike) > 2:
                found.append(Site(branch.path, branch))
    return found


@fault("the norms inside one branch replaced by the identity", "NP206", "warning", with_inner_norms)
def raw_inside(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for norm in site.detail.inner_norms:
        passing(model, norm)


ALL: tuple[Fault, ...] = (
    raw_branch,
    raw_sum,
    raw_kind,
    raw_inside,
    norm_behind_branch,
    twice,
    twice_inline,
    idle,
    uncalled_norm,
)
