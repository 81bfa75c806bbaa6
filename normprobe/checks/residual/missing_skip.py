"""NP309."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar, final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.residual.gaps import gaps
from normprobe.records import Anatomy, Branch, Finding, ReportData, Severity, Stream
from normprobe.records.anatomy import LAYER_KINDS

_NORMED = frozenset({"pre", "sandwich"})


@final
@dataclass(frozen=True)
class MissingSkip(Check):
    """Equal blocks leave out the skip around one branch, or one block of several does.

    ## What it measures

    Residual streams that end and begin anew at the same place of three or more equal blocks, one behind the
    other: each has the branches of one block, normed at their input, is read through a norm at its end, and the next
    stream is made of that by weights of these blocks alone, with no skip past them. And streams that end in a norm
    of one block that norms the input of a branch in most blocks like it, two or more, where the same weights of
    this block are added to no stream; or, whatever modules there are, two streams that would be one row of blocks
    with one more branch between them (three like it, or more), where weights of the shape that write those branches
    stand there. Stages of a hierarchy, a U-Net or an encoder and its decoder differ in width or in the number of
    tokens, or hold several blocks each; blocks of convolutions that change the channels without a skip are
    published. None of these is reported. Where gradients were taken, skips that are detached are found as well:
    autograd knows the trunk before the add and the write, but not the trunk in the add. That is a note where the
    branch reads a detached stream too, which ends the gradient there on purpose (truncated backpropagation,
    training block by block), and in streams without norms: coordinates that are refined step by step are detached
    as well.

    ## Why it matters

    `x = x + attention(norm(x)); return mlp(norm(x))` runs, has the right shapes and trains while it is shallow.
    But nothing passes the MLP: gradient and signal go through the weights of every block, as in a network without
    skips, and each layer has to write anew what it wants to keep.

    ## What to do

    Add the skip: `x + mlp(norm(x))`.

    ## When to ignore it

    When the blocks were designed without that skip.

    ## References

    He et al. 2016 (Identity Mappings), sec. 3: what multiplies the skip multiplies signal and gradient at every
    block; Xiong et al. 2020, table 1 (both sublayers of a block are added).
    """

    code, name, severity, since = "NP309", "missing-skip", Severity.WARNING, "0.1.0"
    explains = "NP306", "NP308"

    fewest: ClassVar[int] = 3

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for each row of equal blocks that all break the stream at one place, and one for those few
        that break it where most do not."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for row in _rows(data.anatomy.streams):
            if len(row) >= self.fewest:
                yield self._found(row)
        single = _single(data.anatomy)
        for equal, blocks in single.items():
            yield self._alone(equal, blocks)
        for stream, equal in gaps(data.anatomy) if not single else ():
            yield self._gap(stream, equal)
        yield from self._cut(data)

    def _found(self, row: list[Stream]) -> Finding:
        first = row[0]
        weights = first.unskipped[0].rpartition(".")[0] or first.unskipped[0]
        places = _places(row)
        kinds = " and ".join(dict.fromkeys(branch.kind for branch in first.branches))
        return self.finding(
            places[0],
            f"the stream ends behind the {kinds} branch of each of {len(row)} equal blocks and is made anew by the "
            f"weights of {weights} behind {first.final_norm}: no skip goes past them",
            value=weights,
            source="Xiong et al. 2020, table 1",
            places=places,
        )

    def _alone(self, equal: tuple[Branch, ...], blocks: list[str]) -> Finding:
        inside = (equal[0].pre_norm or "").removeprefix(f"{equal[0].block}.")
        return self.finding(
            blocks[0],
            f"what follows {inside} is not added to the stream, which ends there: in {len(equal)} equal "
            f"blocks a skip goes past the {equal[0].kind} branch behind it",
            value=f"{blocks[0]}.{inside}",
            source="Xiong et al. 2020, table 1",
            places=blocks,
        )

    def _gap(self, stream: Stream, equal: tuple[Branch, ...]) -> Finding:
        return self.finding(
            str(stream.final_norm),
            f"what follows {stream.final_norm} is not added to the stream, which ends there: in a row of {len(equal)} "
            f"{equal[0].kind} branches, one before or behind each of the others, a skip goes past all but this one",
            value=stream.unskipped[0],
            source="Xiong et al. 2020, table 1",
        )

    def _cut(self, data: ReportData) -> Iterator[Finding]:
        """One finding for the skips of each stream that no gradient passes, and one for those whose branches hand none
        to the stream either."""
        gradients = data.measurements.gradients
        every = () if gradients is None else gradients.branches
        for stream in data.anatomy.streams:
            cut = [one for one in every if one.stream == stream.name and one.cut]
            for whole in (False, True):
                branches = [stream.branches[one.branch] for one in cut if one.cut_whole is whole]
                if branches:
                    yield self._detached(stream, branches, whole)

    def _detached(self, stream: Stream, branches: list[Branch], whole: bool) -> Finding:
        designed = whole or all(branch.placement == "none" for branch in stream.branches)
        and_branch = ", and so is what this branch reads" if whole else ""
        return self.finding(
            branches[0].place,
            f"the skip past the {branches[0].kind} branch is detached{and_branch} ({len(branches)} of {stream.depth} "
            f"adds): the signal passes it, and no gradient does",
            value=float(len(branches)),
            source="the measured gradients",
            severity=Severity.NOTE if designed else None,
            places=[branch.place for branch in branches],
            about="stream" if whole else "gradient",
        )


def _single(anatomy: Anatomy) -> dict[tuple[Branch, ...], list[str]]:
    """Blocks in whose norm a stream ends, by the branches that begin with this norm in most blocks like them."""
    branches = [branch for stream in anatomy.streams for branch in stream.branches]
    added, used = {w for branch in branches for w in branch.writers}, {site.parameter for site in anatomy.weights}
    found: dict[tuple[Branch, ...], list[str]] = {}
    for index, stream in enumerate(anatomy.streams):
        block, equal = _equal(branches, stream.final_norm)
        last = index + 1 == len(anatomy.streams)
        if not equal or not (last or _inside(block, stream.unskipped)):
            continue
        own = {f"{block}{w.removeprefix(b.block)}" for b in equal for w in b.writers if w.startswith(f"{b.block}.")}
        if not own & added and own & {*used, *stream.unskipped}:
            found.setdefault(equal, []).append(block)
    return {equal: blocks for equal, blocks in found.items() if len(equal) > max(1, len(blocks))}


def _equal(branches: list[Branch], norm: str | None) -> tuple[str, tuple[Branch, ...]]:
    """The block that `norm` belongs to, and the branches that begin with this norm in the blocks like it."""
    found: dict[tuple[str, str], list[Branch]] = {}
    for branch in branches:
        block = _child(branch, norm)
        if block is not None and branch.kind in LAYER_KINDS:
            found.setdefault((block, branch.kind), []).append(branch)
    (block, _), equal = max(found.items(), key=lambda item: len(item[1]), default=(("", ""), []))
    return block, tuple(equal)


def _child(branch: Branch, norm: str | None) -> str | None:
    """The block whose `norm` is what the norm at the input of `branch` is in its own block, another one of the same
    container."""
    inside = (branch.pre_norm or "").removeprefix(f"{branch.block}.")
    container = branch.block.rpartition(".")[0]
    block = (norm or "").removesuffix(f".{inside}")
    alike = branch.pre_norm == f"{branch.block}.{inside}" and norm == f"{block}.{inside}"
    return block if alike and block != branch.block and block.rpartition(".")[0] == container else None


def _inside(block: str, names: tuple[str, ...]) -> bool:
    return bool(names) and all(name.startswith(f"{block}.") for name in names)


def _rows(streams: tuple[Stream, ...]) -> Iterator[list[Stream]]:
    """Streams of one block each in a row, each but the last of them going on in the next one without a skip."""
    for key, group in groupby(streams, key=_key):
        row = list(group)
        if key is not None and all(one.unskipped and _own(one, after) for one, after in pairwise(row)):
            yield row


def _key(stream: Stream) -> Any:
    """What equal blocks of one container have in common; None for a stream that is no single normed block."""
    blocks = {branch.block for branch in stream.branches}
    told = all(branch.kind in LAYER_KINDS and branch.placement in _NORMED for branch in stream.branches)
    if len(blocks) != 1 or not told or stream.final_norm is None:
        return None
    container = blocks.pop().rpartition(".")[0]
    return container, stream.width, tuple((branch.kind, branch.placement) for branch in stream.branches)


def _places(row: list[Stream]) -> list[str]:
    """The blocks of a row, or where they add if one module is several of them."""
    blocks = [stream.branches[0].block for stream in row]
    return blocks if len(set(blocks)) == len(row) else [stream.branches[0].add.place for stream in row]


def _own(one: Stream, after: Stream) -> bool:
    """Whether the weights between two streams belong to their blocks, or to the one module that is both."""
    blocks = {one.branches[0].block, after.branches[0].block}
    return all(any(block == "." or name.startswith(f"{block}.") for block in blocks) for name in one.unskipped)
