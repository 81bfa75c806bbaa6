"""A residual stream in words: its name, its size, where its norms sit, how it ends, its scales."""

from __future__ import annotations

from collections import Counter

from normprobe.records import Anatomy, Branch, NormSite, ReportData, Stream
from normprobe.records.parts import whole
from normprobe.report.places import joined
from normprobe.report.wording import listing, number, plural, span

_PLACEMENTS = {
    "pre": "pre-norm",
    "post": "post-norm",
    "sandwich": "sandwich norms",
    "output": "output norms",
    "deepnorm": "DeepNorm",
    "preact": "pre-activation",
    "postact": "post-activation",
    "none": "no norm on the branches",
    "unknown": "placement unknown",
}
_OF_SEVERAL = {"none": "without norms", "unknown": "unknown"}

_SKIPS = {"projection": "projections", "pooling": "poolings", "gate": "gated", "mixture": "mixtures"}

_TOPOLOGIES = {
    "reversible": "reversible: its branches read its twin stream",
    "gated": "highway: gates scale the skips",
    "long_skips": "earlier states are added again",
}


def stream_title(data: ReportData, name: str) -> str:
    """A stream, or a place of a finding, for a reader: the root module is called by the class of the model."""
    root, sign, which = name.partition("#")  # an inline norm of the root module is ".#op:k"
    return (data.target.class_name or "the model") + sign + which if root == "." else name


def placement_text(anatomy: Anatomy, stream: Stream) -> str:
    """Where the norms sit: `pre-norm`, `mixed placement (6 pre-norm, 6 without norms)`."""
    parallel = ", parallel branches" if stream.parallel else ""
    if stream.placement == "mixed":
        words = (_OF_SEVERAL.get(branch.placement) or _PLACEMENTS[branch.placement] for branch in stream.branches)
        return f"mixed placement ({listing(words)}){parallel}"
    inside = sum(bool(inner_norms(anatomy, branch)) for branch in stream.branches) if stream.placement == "none" else 0
    if inside:
        which = "the" if inside == len(stream.branches) else f"{inside} of {len(stream.branches)}"
        return f"norms inside {which} branches{parallel}"
    return _PLACEMENTS[stream.placement] + parallel


def inner_norms(anatomy: Anatomy, branch: Branch) -> list[NormSite]:
    """The norms between the weights of a branch, as far as their own parameters tell."""
    used = set(branch.parameters)
    inner = [norm for norm in anatomy.norms if norm.role == "inner"]
    return [norm for norm in inner if any(whole(name or "", used) in used for name in (norm.weight, norm.bias))]


def path_facts(stream: Stream) -> list[str]:
    """What is unusual about the residual path, if anything."""
    if stream.topology == "parallel_streams":
        return [f"{stream.copies} parallel streams"]
    return [_TOPOLOGIES[stream.topology]] if stream.topology in _TOPOLOGIES else []


def size_text(stream: Stream) -> str:
    """`30 blocks, 60 branches`; without the blocks where the modules do not tell them apart."""
    blocks = {branch.block for branch in stream.branches}
    branches = plural(len(stream.branches), "branch", "branches")
    return branches if "." in blocks else f"{plural(len(blocks), 'block')}{_runs(stream)}, {branches}"


def _runs(stream: Stream) -> str:
    """How often each block runs, where that is more than once."""
    adds: Counter[tuple[str, str, int, str]] = Counter()
    for branch in stream.branches:
        adds[branch.block, branch.path, branch.add.ordinal, branch.kind] += 1
    times = {max(count for add, count in adds.items() if add[0] == block) for block, *_ in adds}
    if times <= {1}:
        return ""
    return f" run {times.pop()} times" if len(times) == 1 else ", some run again"


def width_text(stream: Stream) -> str:
    """`width 576`, `width 16–64` where it changes, `width unknown`."""
    return "width unknown" if stream.width is None else f"width {span(stream.widths or (stream.width,))}"


def final_norm_text(stream: Stream) -> str:
    """The final norm, that there is none, or that it could not be decided, with the reason."""
    reason = f" ({stream.final_norm_reason})" if stream.final_norm_reason else ""
    if stream.final_norm:
        return f"final norm {stream.final_norm}"
    if stream.needs_final_norm is None:
        return f"final norm not decided{reason}"
    return f"{'NO final norm' if stream.needs_final_norm else 'needs no final norm'}{reason}"


def reader_facts(stream: Stream) -> list[str]:
    """Who else reads the stream's end: without a norm, except where the last write is normed itself."""
    raw = "" if stream.placement in ("post", "deepnorm") else "without a norm "
    return [f"also read {raw}by {joined(stream.raw_readers, 60)}"] if stream.raw_readers else []


def scale_facts(stream: Stream) -> list[str]:
    """The factors on the stream's source, on the skips and on the branches, where there are any."""
    skips = {branch.skip_scale for branch in stream.branches if branch.skip_scale != 1.0 and branch.skip == "identity"}
    known = [skip for skip in skips if skip is not None]
    spans = [*([span(known)] if known else []), *(["not constant"] if None in skips else [])]
    told = {"gated": "gate", "parallel_streams": "mixture"}.get(stream.topology)
    kinds = Counter(_SKIPS[branch.skip] for branch in stream.branches if branch.skip not in ("identity", told))
    scales = _branch_scales(stream)
    start = stream.input_multiplier
    return [
        *([f"stream input × {factor_text(start)}"] if start != 1.0 else []),
        *([f"skip scale {', '.join(spans)}"] if spans else []),
        *(f"{count} of {len(stream.branches)} skips are {kind}" for kind, count in kinds.items()),
        *([f"branch scale {', '.join(scales)}"] if scales else []),
    ]


def factor_text(value: float | None) -> str:
    """A factor, or that it could not be told."""
    return "a factor that is learned or not known without weights" if value is None else number(value)


def _branch_scales(stream: Stream) -> list[str]:
    scales = [branch.branch_scale for branch in stream.branches]
    constants = [scale.value for scale in scales if scale.kind == "constant" and scale.value is not None]
    words = {
        "constant" if scale.kind == "constant" else "gated" if scale.kind == "gate" else f"learned per {scale.kind}"
        for scale in scales
        if scale.kind != "none" and not (scale.kind == "constant" and scale.value is not None)
    }
    return [*([span(constants)] if constants else []), *sorted(words)]
