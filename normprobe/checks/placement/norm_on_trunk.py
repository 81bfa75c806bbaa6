"""NP204."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.misplaced_final_norm import misplaced
from normprobe.checks.placement.trunk_norms import POST, on_the_trunk, read_behind, taken_behind, unscaled_post
from normprobe.records import Anatomy, Branch, Finding, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class NormOnTrunk(Check):
    """A norm stands on the residual trunk, so that the skip does not pass around it.

    ## What it measures

    Two forms, read off the recorded data flow. In a stream whose norms sit inside the branches, single sums
    are normed as a whole: `x = norm(x + f(x))`, or the skip of the next block is taken behind its norm,
    `h = norm(x); x = h + f(h)`. Or every block takes its skip behind the norm that it begins with: by its
    modules the stream looks pre-norm, by its data flow it is post-norm; or does so at one kind of branch, whose others
    are normed at their input. These are a note, since there are models that are built so. A norm that ends each round
    of blocks that run again and again is none of these.

    ## Why it matters

    Around a norm inside a branch the trunk goes on untouched, which is what gives a pre-norm stack its
    gradients at any depth. A norm on the trunk rescales everything that was written before it, forward and
    backward. One line decides: `x = norm(x)` in place of `h = norm(x)`.

    ## What to do

    Give the normed value a name of its own and add the branch to what was read before the norm. In a trained
    model, keep what it was trained with, and port it as post-norm.

    ## When to ignore it

    When the model was trained that way on purpose (MiniMax-01, the option
    apply_residual_connection_post_layernorm of BLOOM and Megatron-LM), or the trunk is normed between two
    stages of a pyramid. Streams with a factor on trunk or branches (DeepNorm, nGPT), and blocks that end in a
    norm as all others do, are not reported.

    ## References

    Xiong et al. 2020, sec. 3 and table 1; He et al. 2016 (Identity Mappings in Deep Residual Networks), sec. 3.
    """

    code, name, severity, since = "NP204", "norm-on-trunk", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every stream with norms on its trunk that are not those of a post-norm stack."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            if unscaled_post(stream) and taken_behind(stream):
                yield self._behind(stream)
            elif misplaced(stream) is None and (places := _sums(stream, data.anatomy)):
                yield self._single(stream, places)
            elif behind := _partly(stream):
                yield self._some(stream, behind)

    def _behind(self, stream: Stream) -> Finding:
        norms = [branch.post_norm for branch in stream.branches if branch.post_norm is not None]
        return self.finding(
            stream.name,
            f"every block takes its skip behind the norm that it begins with, as at {norms[0]}: the stream is "
            "post-norm by its data flow",
            value=float(len(norms)),
            source="Xiong et al. 2020, sec. 3",
            severity=Severity.NOTE,
            places=norms,
        )

    def _some(self, stream: Stream, behind: list[Branch]) -> Finding:
        norms = [a.post_norm or a.path for a, b in pairwise(stream.branches) if any(b is one for one in behind)]
        return self.finding(
            stream.name,
            f"the skip of the {behind[0].kind} branch is taken behind the norm before it, as at {norms[0]}, in every "
            "block; the other branches are normed at their input",
            value=float(len(norms)),
            source="Xiong et al. 2020, sec. 3",
            severity=Severity.NOTE,
            places=norms,
        )

    def _single(self, stream: Stream, places: list[int]) -> Finding:
        norms = [stream.branches[i].post_norm or stream.branches[i].place for i in places]
        count = f"{len(places)} of {stream.depth} sums"
        return self.finding(
            norms[0],
            f"norms the trunk of {stream.name} itself ({count}), where the other norms of the stream sit inside "
            "its branches",
            value=float(len(places)),
            source="He et al. 2016, sec. 3",
            places=norms,
        )


def _sums(stream: Stream, anatomy: Anatomy) -> list[int]:
    """The normed sums of a stream, without those whose norm runs more often than it stands on a sum: it ends a round of
    blocks that run again and again."""
    on_sums = Counter(branch.post_norm for one in anatomy.streams for branch in one.branches)
    runs = {norm.path: norm.executions for norm in anatomy.norms}
    norms = [branch.post_norm for branch in stream.branches]
    return [i for i in on_the_trunk(stream) if runs.get(norms[i] or "", 0) <= on_sums[norms[i]]]


def _partly(stream: Stream) -> list[Branch]:
    """The branches of one kind that all take their skip behind their norm, where the others are normed at their input;
    none where the stream is built otherwise."""
    behind, kinds = read_behind(stream), {branch.kind for branch in read_behind(stream)}
    alike = [branch for branch in stream.branches[1:] if branch.kind in kinds]
    others = [branch for branch in stream.branches if branch.kind not in kinds]
    plain = all(b.skip == "identity" and b.skip_scale == 1.0 and b.branch_scale.kind == "none" for b in stream.branches)
    every = len(kinds) == 1 and len(behind) == len(alike) > 1 and plain and stream.topology == "ordinary"
    return behind if every and all(b.placement in ("pre", *POST) and b.pre_norm is not None for b in others) else []
