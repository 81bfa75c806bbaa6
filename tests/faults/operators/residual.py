"""What branches write to the stream: too much, too little, all the same, or what half precision loses (3xx)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, Branch, Stream
from tests.faults.edits import at, parameter, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault

FORWARD = Conditions(level="forward")
HALF16, HALFB = Conditions(level="forward", dtype="float16"), Conditions(level="forward", dtype="bfloat16")
FACTOR = ("NP212",)  # a configuration that states the factor on branches is contradicted
LARGE = ("NP301", "NP302", "NP303", "NP304", *FACTOR)  # what a stream of large writes deserves as well


def change_write(model: nn.Module, branch: Branch, change: Callable[[Tensor], Tensor], trunk: str = "") -> None:
    """Change what a branch adds, right before the add; only to a trunk of this dtype, where one is given."""

    def add(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        if trunk not in str(operands[branch.trunk].dtype):
            raise NotHereError(f"the trunk is not {trunk}")
        operands[1 - branch.trunk] = change(operands[1 - branch.trunk])
        return run(*operands, **kwargs)

    at(model, branch.add, add)


def apart(stream: Stream) -> bool:
    """Whether every write is an operand of an add of its own."""
    adds = {(b.add.path, b.add.op, b.add.ordinal) for b in stream.branches}
    return len(adds) == len(stream.branches) and all(b.apart for b in stream.branches)


def kin(stream: Stream, branch: Branch) -> list[Branch]:
    return [other for other in stream.branches if other.kind == branch.kind]


def writes(anatomy: Anatomy) -> list[Site]:
    """Writes that have two or more others of their kind and are not 0, on streams that can be measured."""
    return [
        Site(branch.path, (stream, branch))
        for stream in anatomy.streams
        if stream.feature_axis is not None and apart(stream)
        for branch in stream.branches
        if len(kin(stream, branch)) > 2 and not closed(branch)
    ]


def closed(branch: Branch) -> bool:
    """Whether a branch is multiplied by 0, as ReZero's start is: it writes nothing that could be changed."""
    return branch.branch_scale.value == 0


def streams(anatomy: Anatomy, least: int = 4) -> list[Site]:
    """Streams of several writes each of which has an add of its own."""
    found = [s for s in anatomy.streams if s.feature_axis is not None and apart(s) and len(s.branches) >= least]
    return [Site(stream.name, stream) for stream in found if not any(closed(branch) for branch in stream.branches)]


def plain(anatomy: Anatomy) -> list[Site]:
    """Streams of six writes or more that are nothing but the sum of these."""
    return [
        site
        for site in streams(anatomy, 6)
        if site.detail.topology == "ordinary" and len(set(site.detail.widths)) <= 1
        if all(b.placement not in ("post", "deepnorm", "postact", "unknown") for b in site.detail.branches)
        if all(b.skip == "identity" and b.skip_scale == 1.0 for b in site.detail.branches)
    ]


# ---- growth


def constant(x: Tensor, size: float) -> Tensor:
    """The same large numbers at every place, of both signs."""
    axis = 1 if x.dim() == 4 else -1
    signs = torch.ones(x.shape[axis], dtype=x.dtype, device=x.device)
    signs[::2] = -1
    return size * (signs.view(-1, 1, 1) if axis == 1 else signs)


@fault("a large bias that all writes have in common", "NP301", "warning", plain, FORWARD)
def aligned(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for branch in site.detail.branches:
        change_write(model, branch, lambda x: x + constant(x, 30.0))


# ---- too small


@fault("writes of a hundred-thousandth", "NP302", "warning", streams, FORWARD, FACTOR)
def diluted(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    if any(b.branch_scale.kind not in ("none", "constant") for b in site.detail.branches):
        raise NotHereError("learned scales may start small on purpose")
    for branch in site.detail.branches:
        change_write(model, branch, lambda x: x * 1e-5)


@fault("a branch that writes nothing", "NP305", "warning", writes, FORWARD, FACTOR)
def dead(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_write(model, site.detail[1], lambda x: x * 0)


def written_by_own(anatomy: Anatomy) -> list[Site]:
    """Such writes with weights of their own right behind which the add is."""
    found = []
    for site in writes(anatomy):
        stream, branch = site.detail
        others = {path for other in stream.branches if other is not branch for path in other.parameters}
        if branch.writers and not others & set(branch.writers) and branch.output_norm is None:
            found.append(site)
    return found


@fault("the weights that write zeroed", "NP305", "warning", written_by_own, FORWARD)
def zeroed(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        for path in site.detail[1].writers:
            parameter(model, path).zero_()


# ---- too large


@fault("a write of three hundred times its size", "NP306", "warning", writes, FORWARD, LARGE)
def overwriting(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    """At least of a size of 30, as branches that start closed write next to nothing."""
    change_write(
        model, site.detail[1], lambda x: x * max(3000.0, 30 / float(x.square().mean().sqrt().clamp_min(1e-20)))
    )


def one_entry(x: Tensor) -> Tensor:
    """One entry of the first sample and place that is large."""
    spike = torch.zeros_like(x)
    spike.reshape(-1)[3 if x.dim() < 4 else 0] = 3e4
    return x + spike


def summed(anatomy: Anatomy) -> list[Site]:
    """Writes whose sum is not normed."""
    return [s for s in writes(anatomy) if s.detail[1].placement not in _ON_SUMS]


@fault("one entry of a write far larger than all others", "NP303", "note", summed, FORWARD)
def massive(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_write(model, site.detail[1], one_entry)


@fault("writes beyond what float16 holds, in float32", "NP304", "warning", writes, FORWARD, LARGE)
def no_headroom(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_write(model, site.detail[1], lambda x: x * (1e6 / float(x.abs().max())))


def growing(anatomy: Anatomy) -> list[Site]:
    """Writes to streams of float16 none of whose sums is normed."""
    return [s for s in summed(anatomy) if all(b.placement not in _ON_SUMS for b in s.detail[0].branches)]


_ON_SUMS = ("post", "deepnorm", "postact")


@fault("a sum that overflows in float16", "NP304", "error", growing, HALF16)
def overflowing(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_write(model, site.detail[1], lambda x: x * (6e4 / float(x.abs().max())), "float16")
    stream, branch = site.detail
    for other in stream.branches[stream.branches.index(branch) + 1 :]:
        change_write(model, other, lambda x: x.sign() * 6e4)


@fault("writes too small for bfloat16", "NP307", "warning", streams, HALFB, ("NP302", "NP305", *FACTOR))
def rounded(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    """By more than the norms on what a branch writes, and small embeddings, hold these apart."""
    for branch in site.detail.branches:
        change_write(model, branch, lambda x: x * 1e-6)


# ---- tokens


def attending(anatomy: Anatomy) -> list[Site]:
    """Plain streams that attention writes to, of tokens."""
    return [s for s in plain(anatomy) if any(b.kind == "attention" for b in s.detail.branches)]


@fault("writes that are the same for all tokens", "NP308", "warning", attending, FORWARD, ("NP301", "NP302", "NP306"))
def alike(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for branch in site.detail.branches:
        change_write(model, branch, lambda x: x + constant(x, 300.0))


ALL: tuple[Fault, ...] = (
    aligned,
    diluted,
    dead,
    zeroed,
    overwriting,
    massive,
    no_headroom,
    overflowing,
    rounded,
    alike,
)
