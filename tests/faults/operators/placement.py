"""Norms at the end of a stream and on its trunk, that are missing, twice or misplaced (2xx)."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from normprobe.records import Anatomy, Branch, NormSite, Stream
from tests.faults.edits import Twice, at, before, behind, module_at, norm_at, overlay, passing, replace, uncalled
from tests.faults.fault import Fault, NotHereError, Severity, Site, fault
from tests.faults.written import FEATURES, fresh, written

PLAIN = ("pre", "sandwich", "output", "none")
POST = ("post", "deepnorm")


def inside(stream: Stream) -> bool:
    """Whether the norms of a stream sit inside its branches, so that it needs one at its end."""
    return stream.topology == "ordinary" and all(b.placement in PLAIN for b in stream.branches)


def ends(anatomy: Anatomy) -> list[Site]:
    """The final norms of streams that need one, with their streams."""
    return [
        Site(stream.final_norm, stream)
        for stream in anatomy.streams
        if stream.final_norm is not None and inside(stream) and norm_at(anatomy, stream.final_norm).module
        if stream.final_norm != "."
    ]


def read_by_the_head(anatomy: Anatomy, site: Site) -> Severity:
    """At least a warning, for heads that pool what they read; a note without a head: the reader is not seen."""
    return "note" if anatomy.head is None else "warning"


# ---- the end of a stream


@fault("the final norm built and not called", "NP201", read_by_the_head, ends)
def forgotten(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    uncalled(model, site.path)


@fault("the final norm replaced by the identity", "NP201", read_by_the_head, ends)
def dropped(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    passing(model, site.path)


@fault("the final norm twice", "NP202", "warning", lambda a: [s for s in ends(a) if norm_at(a, s.path).kind != "dyt"])
def twice_at_the_end(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = module_at(model, site.path)
    replace(model, site.path, Twice(held, copy.deepcopy(held)))


def with_several_blocks(anatomy: Anatomy) -> list[Site]:
    return [site for site in ends(anatomy) if len(blocks(site.detail)) > 2 and along_last(anatomy, site.path)]


def blocks(stream: Stream) -> list[str]:
    """The blocks of a stream in their order, those that are modules of their own."""
    return [path for path in dict.fromkeys(b.block for b in stream.branches) if path != "."]


def adds_within(stream: Stream) -> bool:
    """Whether every block holds its adds."""
    return all(f"{b.add.path}.".startswith(f"{b.block}.") for b in stream.branches)


def along_last(anatomy: Anatomy, path: str) -> bool:
    norm = norm_at(anatomy, path)
    return norm.kind in FEATURES and norm.axes == (-1,) and norm.eps is not None


@fault("the final norm called before the last block", "NP203", read_by_the_head, with_several_blocks)
def before_the_last_block(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = module_at(model, site.path)
    passing(model, site.path)
    norm_before(model, blocks(site.detail)[-1], held)


def norm_before(model: nn.Module, path: str, norm: nn.Module) -> None:
    """Norm what a block is given, by a norm that it holds."""
    block = module_at(model, path)
    block.add_module("planted", norm)
    before(block, lambda x: norm(x))


def one_after_the_other(stream: Stream) -> bool:
    return not any(b.parallel for b in stream.branches) and all(b.apart for b in stream.branches)


@fault(
    "the final norm called before the last write",
    "NP203",
    read_by_the_head,
    lambda anatomy: [s for s in with_several_blocks(anatomy) if one_after_the_other(s.detail)],
)
def before_the_last_write(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = written(model, norm_at(anatomy, site.path))
    passing(model, site.path)
    at(model, site.detail.branches[-2].add, lambda run, *args, **kwargs: held(run(*args, **kwargs)))


# ---- the trunk


def sound(stream: Stream) -> bool:
    """Whether the norms of a stream sit inside its branches, and its end is not raw."""
    return inside(stream) and (stream.final_norm is not None or stream.needs_final_norm is False)


def inner_blocks(anatomy: Anatomy) -> list[Site]:
    """Blocks but the first of streams whose norms sit inside the branches, with a norm to copy."""
    found = []
    for stream in anatomy.streams:
        norm = a_norm(anatomy, stream)
        if sound(stream) and norm is not None and len(blocks(stream)) > 2 and stream.feature_axis == -1:
            found += [Site(path, (stream, norm)) for path in blocks(stream)[1:]]
    return found


def a_norm(anatomy: Anatomy, stream: Stream) -> NormSite | None:
    """A norm of the stream over its whole width."""
    paths = [stream.final_norm, *(b.pre_norm for b in stream.branches), *(b.output_norm for b in stream.branches)]
    norms = [norm_at(anatomy, path) for path in paths if path is not None]
    return next((n for n in norms if n.size == stream.width and along_last(anatomy, n.path)), None)


@fault("x = norm(x) at the start of a block", "NP204", "warning", inner_blocks)
def normed_trunk(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm_before(model, site.path, fresh(model, site.detail[0].width, site.detail[1]))


def inner_writes(anatomy: Anatomy) -> list[Site]:
    """Writes but the last of such streams that have one add each."""
    found = []
    for stream in anatomy.streams:
        norm = a_norm(anatomy, stream)
        plain = sound(stream) and one_after_the_other(stream) and stream.feature_axis == -1
        if plain and norm is not None and len(blocks(stream)) > 2:
            found += [Site(branch.path, (stream, norm, branch)) for branch in stream.branches[:-1]]
    return found


@fault("x = norm(x + f(x)) at one write", "NP204", "warning", inner_writes)
def normed_sum(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    stream, norm, branch = site.detail
    made = fresh(model, stream.width, norm)
    at(model, branch.add, lambda run, *args, **kwargs: made(run(*args, **kwargs)))


def normed_before(anatomy: Anatomy) -> list[Site]:
    """Such writes whose branch reads the stream through a module of its own, but the first of the stream."""
    found = []
    for site in inner_writes(anatomy):
        stream, _, branch = site.detail
        norm = anatomy.norm(branch.pre_norm or "")
        if norm is not None and norm.module and norm.executions == 1 and branch is not stream.branches[0]:
            found.append(Site(norm.path, (stream, branch)))
    return found


@fault("the skip of one branch taken behind its norm", "NP204", "warning", normed_before)
def skip_behind(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    taken_behind(model, site.path, site.detail[1])


def taken_behind(model: nn.Module, norm: str, branch: Branch) -> None:
    """The trunk at this add is what the norm has made."""
    seen: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        seen[:] = [y]
        return y

    def add(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        behind_norm = seen.pop()
        if behind_norm.shape != operands[branch.trunk].shape:
            raise NotHereError("the norm is of more than the trunk")
        operands[branch.trunk] = behind_norm
        return run(*operands, **kwargs)

    behind(module_at(model, norm), keep)
    at(model, branch.add, add)


def all_normed_before(anatomy: Anatomy) -> list[Site]:
    """The first write of streams all of whose writes have a norm of their own before them."""
    found = []
    for stream in anatomy.streams:
        norms = [anatomy.norm(b.pre_norm or "") for b in stream.branches]
        own = all(n is not None and n.module and n.executions == 1 for n in norms)
        unlike = all(b.placement == "pre" and b.branch_scale.kind == "none" for b in stream.branches)
        if sound(stream) and one_after_the_other(stream) and own and unlike and len(blocks(stream)) > 2:
            found.append(Site(stream.name, stream))
    return found


@fault("the skip of every branch taken behind its norm", "NP204", "note", all_normed_before)
def skips_behind(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for branch in site.detail.branches:
        taken_behind(model, branch.pre_norm, branch)


def post_stacks(anatomy: Anatomy) -> list[Site]:
    """The first blocks of unscaled post-norm streams, where all of a block's adds are its own."""
    found = []
    for stream in anatomy.streams:
        plain = all(
            b.skip_scale == 1.0 and b.branch_scale.kind == "none" and b.skip == "identity" for b in stream.branches
        )
        usual = stream.placement == "post" and stream.topology == "ordinary"
        if usual and plain and adds_within(stream) and blocks(stream):
            found.append(Site(blocks(stream)[0], len(stream.branches)))
    return found


@fault("a post-norm stack of more than 48 writes", "NP205", "warning", post_stacks)
def deep(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    """The first block runs as often as it takes."""

    def again(below: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(49):
            output = below(x, *args, **kwargs)
            x = output if isinstance(output, Tensor) else output[0]
        return output

    overlay(module_at(model, site.path), again)


ALL: tuple[Fault, ...] = (
    forgotten,
    dropped,
    twice_at_the_end,
    before_the_last_block,
    before_the_last_write,
    normed_trunk,
    normed_sum,
    skip_behind,
    skips_behind,
    deep,
)
