"""What the report says about the build of the model, in short facts that every renderer shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from normprobe.records import Anatomy, AttentionSite, Branch, NormSite, NormSpec, ReportData, Stream
from normprobe.report.wording import BRANCHES, KINDS, amount, listing, number, plural

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
_EPS = {"outside_sqrt": " outside the root", "clamp": " as a clamp", "scaled": " times the peak"}


def headline(data: ReportData) -> str:
    """The target in one line: class, parameters, dtype, device, inputs, revision, as far as they are known."""
    target = data.target
    facts = (
        target.class_name,
        f"{amount(target.parameters)} parameters" if target.parameters else "",
        target.dtype,
        target.device,
        target.inputs,
        f"revision {target.revision}" if target.revision else "",
        "structure only" if data.level == "structure" else "",
    )
    return " · ".join(fact for fact in facts if fact)


def broken_output(data: ReportData) -> str:
    """That the output was not finite and where that began; empty where it was finite or not looked at."""
    if data.measurements.output_finite is not False:
        return ""
    first = data.measurements.first_non_finite
    return "the output is not finite" + (f"; first at {first}" if first else "; where it began is not known")


def stream_lines(anatomy: Anatomy, stream: Stream) -> list[list[str]]:
    """One residual stream: lines for its build, its norms, its attention and its scales; none is empty."""
    kinds = listing(BRANCHES.get(branch.kind, branch.kind) for branch in stream.branches)
    norms = _named(anatomy, _norm_paths(stream))
    sites = [site for site in anatomy.attention if owner(anatomy, site.path) is stream]
    entry = [f"entry norm {stream.entry_norm}"] if stream.entry_norm else []
    build = [f"{size_text(stream)} ({kinds})" if kinds else size_text(stream), f"width {stream.width}"]
    lines = (
        [placement_text(stream), *build],
        [*norm_kinds(norms), *entry, final_norm_text(stream)],
        *([layout] for layout in attention_facts(sites)),
        _scales(stream),
    )
    return [line for line in lines if line]


def stream_facts(anatomy: Anatomy, stream: Stream) -> list[str]:
    """All facts of `stream_lines` in a row."""
    return [fact for line in stream_lines(anatomy, stream) for fact in line]


def leftover_facts(anatomy: Anatomy) -> list[str]:
    """What lies off every stream: other norms by role, attention of no stream, computed weights, the head."""
    on_streams = {path for stream in anatomy.streams for path in _norm_paths(stream)}
    other = [norm for norm in anatomy.norms if norm.path not in on_streams]
    sites = [site for site in anatomy.attention if owner(anatomy, site.path) is None]
    head = anatomy.head
    roles = listing(norm.role for norm in other)
    return [
        *([f"{plural(len(other), 'norm')} off the streams: {roles}"] if other and anatomy.streams else []),
        *([f"{plural(len(other), 'norm')}: {roles}"] if other and not anatomy.streams else []),
        *(norm_kinds(other) if not anatomy.streams else []),
        *(f"{fact} (off the streams)" for fact in attention_facts(sites)),
        *([f"computed weights: {listing(_computed(anatomy))}"] if anatomy.reparametrizations else []),
        *([f"head {head.path}" + (f", tied to {head.tied_to}" if head.tied_to else "")] if head else []),
        *([f"logits × {number(head.logit_multiplier)}"] if head and head.logit_multiplier != 1 else []),
        *([f"logits soft-capped at {number(head.softcap)}"] if head and head.softcap else []),
    ]


def owner(anatomy: Anatomy, path: str) -> Stream | None:
    """The stream that has a block around the module at `path`, the closest block where several have."""
    around = [
        (len(branch.block), position)
        for position, stream in enumerate(anatomy.streams)
        for branch in stream.branches
        if path == branch.block or path.startswith(f"{branch.block}.")
    ]
    return anatomy.streams[max(around)[1]] if around else None


def norm_kinds(norms: Sequence[NormSpec]) -> list[str]:
    """The distinct norms, most frequent first: `RMSNorm eps 1e-05`, with counts where there are several."""
    kinds = Counter(_kind(norm) for norm in norms)
    if len(kinds) == 1:
        return list(kinds)
    return [" + ".join(f"{count} × {kind}" for kind, count in kinds.most_common())] if kinds else []


def attention_facts(sites: Sequence[AttentionSite]) -> list[str]:
    """The distinct attention layouts: heads, head size, scale, QK-Norm, caps and windows."""
    groups: dict[str, list[AttentionSite]] = {}
    for site in sites:
        groups.setdefault(_layout(site), []).append(site)
    share = f" of {len(sites)}" if len(groups) > 1 else ""
    return [
        f"{layout}{_windows(group)}" + (f" ({len(group)}{share} sites)" if share else "")
        for layout, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _kind(norm: NormSpec) -> str:
    eps = f" eps {number(norm.eps)}{_EPS.get(norm.eps_placement, '')}" if norm.eps is not None else ""
    groups = f" {plural(norm.groups, 'group')}" if norm.groups and norm.kind == "groupnorm" else ""
    return ("frozen " if norm.frozen else "") + KINDS[norm.kind] + groups + eps


def _layout(site: AttentionSite) -> str:
    grouped = f" ({site.kv_heads} kv)" if site.kv_heads != site.heads else ""
    scale = f"scale {number(site.scale)}" if site.scale is not None else "scale not constant"
    facts = (
        f"{'cross-' if site.cross else ''}attention {plural(site.heads, 'head')}{grouped} × {site.head_dim}",
        scale + (f" ({site.scale_parameter})" if site.scale_parameter else ""),
        _qk_norm(site),
        f"soft-capped at {number(site.softcap)}" if site.softcap is not None else "",
        "sinks" if site.sinks else "",
    )
    return ", ".join(fact for fact in facts if fact)


def _windows(sites: Sequence[AttentionSite]) -> str:
    windows = Counter(site.window for site in sites if site.window is not None)
    return "".join(
        f", window {window}" + (f" at {count} of {len(sites)}" if count < len(sites) else "")
        for window, count in sorted(windows.items())
    )


def _qk_norm(site: AttentionSite) -> str:
    norm = site.qk_norm
    if norm is None:
        return "no QK-Norm"
    one_sided = {(True, False): " on q only", (False, True): " on k only"}
    sides = one_sided.get((bool(norm.query), bool(norm.key)), "")
    rope = f" {norm.rope} rotary" if norm.rope in ("before", "after") else ""
    axis = {"head": "per head", "full": "over all heads"}.get(norm.axis, "on an unknown axis")
    return f"QK-Norm {KINDS[norm.kind]} {axis}{rope}{sides}"


def placement_text(stream: Stream) -> str:
    """Where the norms sit: `pre-norm`, `mixed placement (6 pre, 6 none)`."""
    parallel = ", parallel branches" if stream.parallel else ""
    if stream.placement == "mixed":
        return f"mixed placement ({listing(branch.placement for branch in stream.branches)}){parallel}"
    return _PLACEMENTS[stream.placement] + parallel


def size_text(stream: Stream) -> str:
    """`30 blocks, 60 branches`."""
    blocks = {branch.block for branch in stream.branches}
    return f"{plural(len(blocks), 'block')}, {plural(len(stream.branches), 'branch', 'branches')}"


def final_norm_text(stream: Stream) -> str:
    """The final norm, that there is none, or that it could not be decided, with the reason."""
    reason = f" ({stream.final_norm_reason})" if stream.final_norm_reason else ""
    if stream.final_norm:
        return f"final norm {stream.final_norm}"
    if stream.needs_final_norm is None:
        return f"final norm not decided{reason}"
    return f"{'NO final norm' if stream.needs_final_norm else 'needs no final norm'}{reason}"


def _scales(stream: Stream) -> list[str]:
    skips = {branch.skip_scale for branch in stream.branches if branch.skip_scale != 1.0}
    scales = {_branch_scale(branch) for branch in stream.branches if branch.branch_scale.kind != "none"}
    return [
        *([f"stream input × {number(stream.input_multiplier)}"] if stream.input_multiplier != 1.0 else []),
        *([f"skip scale {_span(skips)}"] if skips else []),
        *([f"branch scale {', '.join(sorted(scales))}"] if scales else []),
    ]


def _branch_scale(branch: Branch) -> str:
    scale = branch.branch_scale
    if scale.kind == "constant":
        return number(scale.value) if scale.value is not None else "constant"
    return "gated" if scale.kind == "gate" else f"learned per {scale.kind}"


def _span(values: Iterable[float]) -> str:
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)}–{number(high)}"


def _norm_paths(stream: Stream) -> list[str]:
    paths = [
        path
        for branch in stream.branches
        for path in (branch.pre_norm, branch.output_norm, branch.post_norm)
        if path
    ]
    ends = [path for path in (stream.entry_norm, stream.final_norm) if path]
    return list(dict.fromkeys([*paths, *ends]))


def _named(anatomy: Anatomy, paths: Sequence[str]) -> list[NormSite]:
    sites = {norm.path: norm for norm in anatomy.norms}
    return [sites[path] for path in paths if path in sites]


def _computed(anatomy: Anatomy) -> list[str]:
    return [item.kind.replace("_", " ") for item in anatomy.reparametrizations]
