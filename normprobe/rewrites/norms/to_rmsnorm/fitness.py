"""Whether a stream's mean can be kept at zero without changing what the model computes."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Anatomy, Branch, NormSite, Stream, WeightSite


def subtracting(anatomy: Anatomy, stream: Stream, sums: bool = False) -> tuple[NormSite, ...]:
    """The norms by which this stream is read, first to last; with `sums` also those that norm a sum of it."""
    read = (path for b in stream.branches for path in (b.pre_norm, b.post_norm if sums else None))
    paths = dict.fromkeys([*read, stream.final_norm])
    return tuple(norm for path in paths if path is not None and (norm := anatomy.norm(path)) is not None)


def why_not(anatomy: Anatomy, stream: Stream) -> str | None:
    """Why the norms of this stream cannot leave the mean out; None where they can."""
    norms = subtracting(anatomy, stream)
    normed = next((branch.post_norm for branch in stream.branches if branch.post_norm is not None), None)
    if normed is not None:
        return f"it is normed itself, by {normed}, whose gain and offset bring a mean of their own for every token"
    if not any(norm.subtracts_mean for norm in norms):
        return "none of the norms that read it subtracts the mean"
    return next(iter([*_stream(stream), *_readers(stream, norms), *_writers(anatomy, stream)]), None)


def _stream(stream: Stream) -> Iterator[str]:
    if stream.topology != "ordinary" or stream.copies > 1:
        yield f"its residual path is not a plain one ({stream.topology.replace('_', ' ')})"
    if stream.feature_axis != -1 or stream.width is None or len(stream.widths) > 1:
        yield "its features are not the last axis, of one width, everywhere"
    for branch in stream.branches:
        if branch.skip != "identity" or branch.feature_axis != -1:
            yield f"its skip at {branch.path} is no identity"
        if branch.branch_scale.kind in ("channel", "gate"):
            kind = branch.branch_scale.kind
            yield f"the write at {branch.path} passes a scale for each {kind} behind its writers, which brings a mean"
        if branch.output_norm is not None:
            yield f"the write at {branch.path} ends in the norm {branch.output_norm}, whose gain brings a mean back"


def _readers(stream: Stream, norms: tuple[NormSite, ...]) -> Iterator[str]:
    for branch in stream.branches:
        if branch.pre_norm is None:
            yield f"{branch.readers[0] if branch.readers else branch.path} reads it without a norm"
    if stream.raw_readers or (stream.final_norm is None and stream.needs_final_norm is not False):
        yield f"{', '.join(stream.raw_readers) or 'the head'} reads it without a norm"
    for norm in norms:
        if not norm.subtracts_mean:
            yield f"{norm.path} reads it and does not subtract the mean"
        elif norm.kind != "layernorm" or norm.axes != (-1,) or norm.size != stream.width:
            yield f"{norm.path} is a {norm.kind} over {norm.size} elements of axes {norm.axes}"
        elif not norm.module:
            yield f"{norm.path} is written out inside a forward; there is no module to change"
        elif norm.eps is None or norm.eps_placement != "inside_sqrt" or norm.unbiased:
            yield f"eps of {norm.path} is not inside the root of the biased variance"
        elif norm.affine == "other":
            yield f"how {norm.path} applies its gain could not be read"


def _writers(anatomy: Anatomy, stream: Stream) -> Iterator[str]:
    sites = {site.parameter: site for site in anatomy.weights}
    for branch in stream.branches:
        known = [sites[name] for name in branch.writers if name in sites]
        if not known:
            yield f"the weights that write at {branch.path} could not be told"
        yield from (why for site in known if (why := _writer(site, branch, stream.width)))


def _writer(site: WeightSite, branch: Branch, width: int | None) -> str | None:
    if not {"reader", "writer"}.issuperset(site.roles):
        return f"{site.parameter} is used elsewhere too ({', '.join(site.roles)})"
    if site.shape[site.output_axis] != width:
        return f"{site.parameter} gives {site.shape[site.output_axis]} features where {branch.path} adds {width}"
    return None
