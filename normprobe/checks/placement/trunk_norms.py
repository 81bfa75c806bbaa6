"""What the checks share that look at norms on the sum of a stream."""

from __future__ import annotations

from itertools import pairwise

from normprobe.records import Branch, Stream

POST = ("post", "deepnorm")


def on_the_trunk(stream: Stream) -> list[int]:
    """The writes whose sum is normed, in a stream of which most blocks leave their sums alone.

    Where most blocks end in a norm on their sum, the stream is post-norm in parts (as a conformer is), and nothing is
    found. The final norm counts for no block; it is one that lies outside of all blocks, where others lie inside.
    """
    held = [branch.placement in POST for branch in stream.branches]
    last = stream.branches[-1].post_norm if held else None
    if held and (last == stream.final_norm or (not _inside(last, stream) and _inner(stream))):
        held[-1] = False
    normed = [i for i, on_sum in enumerate(held) if on_sum]
    blocks = stream.blocks()
    of = [number for number, block in enumerate(blocks) for _ in block]
    ended = {of[i] for i in normed}
    return normed if 2 * len(ended) <= len(blocks) and len(normed) < len(of) else []


def _inside(norm: str | None, stream: Stream) -> bool:
    """Whether a norm lies in one of the blocks of a stream; what holds blocks is none."""
    blocks = {branch.block for branch in stream.branches}
    return any(within(norm, b) for b in blocks if not any(other.startswith(f"{b}.") for other in blocks))


def _inner(stream: Stream) -> bool:
    """Whether there are norms on the sums before the last one, all of them inside blocks."""
    norms = [branch.post_norm for branch in stream.branches[:-1] if branch.placement in POST]
    return bool(norms) and all(_inside(norm, stream) for norm in norms)


def unscaled_post(stream: Stream) -> bool:
    """Whether every sum of a stream is normed and nothing on it is scaled."""
    plain = all(b.skip == "identity" and b.skip_scale == 1.0 and b.branch_scale.kind == "none" for b in stream.branches)
    return stream.placement == "post" and stream.topology == "ordinary" and plain


def taken_behind(stream: Stream) -> bool:
    """Whether each block takes its skip behind its own first norm: the norm on a block's sum lies in the next block."""
    steps = [(a, b) for a, b in pairwise(stream.branches) if a.block != b.block]
    return bool(steps) and all(within(a.post_norm, b.block) for a, b in steps)


def read_behind(stream: Stream) -> list[Branch]:
    """The branches without a norm of their own that read what a norm on the trunk has made, where the branch before
    has its norm at its input: that norm is theirs, and their skip is taken behind it."""
    pairs = pairwise(stream.branches)
    return [b for a, b in pairs if b.placement == "none" and a.placement in POST and a.pre_norm is not None]


def within(norm: str | None, block: str) -> bool:
    """Whether a norm, a module or operations of a forward, lies in a block."""
    return norm is not None and norm.startswith((f"{block}.", f"{block}#"))
