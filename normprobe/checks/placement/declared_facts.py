"""What the data flow says of each fact that a configuration may state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normprobe.checks.base import number
from normprobe.checks.declarations import governs
from normprobe.checks.placement.trunk_norms import POST
from normprobe.records import AttentionSite, Declared, ReportData, Stream
from normprobe.records.declared import Fact


@dataclass(frozen=True)
class Told:
    """What was read at `places` in words (`text`); `value` None where the fact is absent; `unknown` says why nothing is
    known of it."""

    places: tuple[str, ...]
    value: float | bool | None = None
    text: str = ""
    unknown: str = ""


def _attention_softcap(declared: Declared, data: ReportData) -> Told | None:
    sites = _sites(declared, data)
    capped = [site for site in sites if site.softcap is not None]
    bare = [site for site in sites if site.softcap is None]
    if bare:
        return Told(_paths(bare), None, f"and {_count(bare, sites)} cap no logits")
    return Told(_paths(capped), capped[0].softcap, f"and logits are capped at {capped[0].softcap}") if capped else None


def _attention_scale(declared: Declared, data: ReportData) -> Told | None:
    sites = _sites(declared, data)
    unknown = [site for site in sites if site.scale is None]
    if unknown:
        return Told(_paths(unknown), unknown=f"{declared.field}: the factor on q·kᵀ is not constant")
    odd = [site for site in sites if abs((site.scale or 0.0) / declared.value - 1) > _ROUNDING] or sites
    return _same(_paths(odd), [site.scale for site in odd], "q·kᵀ is multiplied by")


def _qk_norm(declared: Declared, data: ReportData) -> Told | None:
    sites = _sites(declared, data)
    if not declared.value or not sites or any(site.qk_norm is not None for site in sites):
        return None
    lost = [site for site in sites if not {"q", "k"} <= site.columns.keys()]
    if lost:
        return Told(_paths(lost), unknown=f"{declared.field}: queries or keys could not be followed to their weights")
    return Told(_paths(sites), False, "and no query or key is normed")


def _window(declared: Declared, data: ReportData) -> Told | None:
    sites = [site for site in _sites(declared, data) if site.causal]
    if not sites or any(site.window is not None for site in sites):
        return None
    longest = max((site.tokens[1] for site in sites if site.tokens is not None), default=0)
    if longest <= declared.value:
        why = f"{declared.field}: the recorded input has {longest} keys, no more than the window of {declared.value:g}"
        return Told(_paths(sites), unknown=why)
    return Told(_paths(sites), float(longest), f"and every query sees all earlier keys, {longest} at most")


def _input_multiplier(declared: Declared, data: ReportData) -> Told | None:
    streams = [s for s in _streams(declared, data) if s.source is not None]
    return _same(
        [s.name for s in streams], [s.input_multiplier for s in streams], "embeddings enter the stream multiplied by"
    )


def _branch_multiplier(declared: Declared, data: ReportData) -> Told | None:
    branches = [b for s in _streams(declared, data) for b in s.branches]
    plain = [b for b in branches if b.branch_scale.kind in ("none", "constant")]
    values = [1.0 if b.branch_scale.kind == "none" else b.branch_scale.value for b in plain]
    known = [(b, v) for b, v in zip(plain, values, strict=True) if v is not None]
    odd = [(b, v) for b, v in known if abs(v / declared.value - 1) > _ROUNDING] or known
    return _same([b.path for b, _ in odd], [v for _, v in odd], "branches are added multiplied by")


def _parallel(declared: Declared, data: ReportData) -> Told | None:
    streams = [s for s in _streams(declared, data) if len(s.branches) > 1]
    sides = {branch.parallel for stream in streams for branch in stream.branches}
    if len(sides) != 1:
        return None
    (side,) = sides
    words = "and all branches run side by side" if side else "and branches run one after the other"
    return Told(tuple(stream.name for stream in streams), side, words)


def _pre_norm(declared: Declared, data: ReportData) -> Told | None:
    streams = _streams(declared, data)
    placements = {b.placement for s in streams for b in s.branches if b.kind in ("attention", "mlp")}
    if not placements or not (placements == {"pre"} or placements <= set(POST)):
        return None
    words = "and norms sit before branches" if placements == {"pre"} else "and norms sit on the sums"
    return Told(tuple(stream.name for stream in streams), placements == {"pre"}, words)


def _logit_multiplier(declared: Declared, data: ReportData) -> Told | None:
    head = data.anatomy.head
    if head is None or not governs(declared, head.path, data.declared):
        return None
    if head.logit_multiplier is None:
        return Told((head.path,), unknown=f"{declared.field}: the factor on the logits is not constant")
    return Told((head.path,), head.logit_multiplier, f"and logits are multiplied by {number(head.logit_multiplier)}")


def _logit_softcap(declared: Declared, data: ReportData) -> Told | None:
    head = data.anatomy.head
    if head is None or not governs(declared, head.path, data.declared):
        return None
    words = "and the logits are not capped" if head.softcap is None else f"and logits are capped at {head.softcap}"
    return Told((head.path,), head.softcap, words)


def _tied(declared: Declared, data: ReportData) -> Told | None:
    head = data.anatomy.head
    if head is None or head.tied_to is not None or not governs(declared, head.path, data.declared):
        return None
    weights = data.anatomy.weights
    shape = next((weight.shape for weight in weights if weight.parameter == head.path), None)
    entries = {stream.source for stream in data.anatomy.streams}
    every = [w for w in weights if "embedding" in w.roles and w.kind == "embedding"]
    rows = max((table.shape[0] for table in every), default=0)  # a classifier may have the shape of a small table
    tables = [w for w in every if w.shape == shape and (w.shape[0] == rows or w.parameter in entries)]
    if not tables or any(table.parameter == head.path for table in tables):
        return None
    table = next((w for w in tables if w.parameter in entries), tables[0])
    return Told((head.path,), False, f"and {head.path} and {table.parameter} are two tensors")


def _same(places: Sequence[str], values: Sequence[float | None], words: str) -> Told | None:
    """The one value that all of `places` have; None where there are none, where one is not known, or they differ."""
    known = {round(value, 9) for value in values if value is not None}
    if len(known) != 1 or None in values:
        return None
    (value,) = known
    return Told(tuple(dict.fromkeys(places)), value, f"and {words} {number(value)}")


def _sites(declared: Declared, data: ReportData) -> list[AttentionSite]:
    """The attention sites of a statement whose logits and scale the flow tells: those of torch's own operations."""
    sites = [site for site in data.anatomy.attention if governs(declared, site.path, data.declared)]
    return [site for site in sites if not site.cross and site.kernel.startswith(_KERNELS)]


def _streams(declared: Declared, data: ReportData) -> list[Stream]:
    found = [s for s in data.anatomy.streams if s.topology == "ordinary"]
    return [s for s in found if all(governs(declared, b.path, data.declared) for b in s.branches)]


def _paths(sites: Sequence[AttentionSite]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site.path for site in sites))


def _count(some: Sequence[object], every: Sequence[object]) -> str:
    whole = f"{len(every)} attention site{'' if len(every) == 1 else 's'}"
    return f"{whole}" if len(some) == len(every) else f"{len(some)} of {whole}"


_ROUNDING = 1e-6
_KERNELS = ("aten.", "scaled_dot_product_attention")
READERS: dict[Fact, Callable[[Declared, ReportData], Told | None]] = {
    "attention_softcap": _attention_softcap,
    "attention_scale": _attention_scale,
    "qk_norm": _qk_norm,
    "window": _window,
    "input_multiplier": _input_multiplier,
    "branch_multiplier": _branch_multiplier,
    "parallel": _parallel,
    "pre_norm": _pre_norm,
    "logit_multiplier": _logit_multiplier,
    "logit_softcap": _logit_softcap,
    "tied": _tied,
}
