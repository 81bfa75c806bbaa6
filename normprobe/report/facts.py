"""Norms and attention sites in a few words each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from normprobe.records import AttentionSite, NormSpec
from normprobe.report.places import joined
from normprobe.report.wording import KINDS, number, plural, span

_AXES = {
    "head": "per head",
    "full": "over all heads",
    "heads": "across heads",
    "tokens": "over tokens",
    "unknown": "on an unknown axis",
}
_EPS = {"outside_sqrt": " outside the root", "clamp": " as a clamp", "scaled": " times the peak"}


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
        learned = "scale not constant" if site.scale is None else "learned scale"
        alike = learned if site.scale_parameter else _scale([site])
        groups.setdefault(_layout(site, alike), []).append(site)
    share = f" of {len(sites)}" if len(groups) > 1 else ""
    return [
        f"{_layout(group[0], _scale(group))}{_windows(group)}" + (f" ({len(group)}{share} sites)" if share else "")
        for group in sorted(groups.values(), key=lambda group: -len(group))
    ]


def _kind(norm: NormSpec) -> str:
    eps = f" eps {number(norm.eps)}{_EPS.get(norm.eps_placement, '')}" if norm.eps is not None else ""
    groups = f" {plural(norm.groups, 'group')}" if norm.groups and norm.kind == "groupnorm" else ""
    divisor = " by the unbiased deviation" if norm.unbiased else ""
    return ("frozen " if norm.frozen else "") + KINDS[norm.kind] + divisor + groups + eps


def _layout(site: AttentionSite, scale: str) -> str:
    grouped = f" ({site.kv_heads} kv)" if site.kv_heads != site.heads else ""
    facts = (
        f"{'cross-' if site.cross else ''}attention {plural(site.heads, 'head')}{grouped} × {site.head_dim}",
        scale,
        _qk_norm(site),
        f"soft-capped at {number(site.softcap)}" if site.softcap is not None else "",
        "sinks" if site.sinks else "",
    )
    return ", ".join(fact for fact in facts if fact)


def _scale(sites: Sequence[AttentionSite]) -> str:
    """The factor on the logits, its range where every layer has learned its own, and the parameters behind it."""
    known = [site.scale for site in sites if site.scale is not None]
    learned = [site.scale_parameter for site in sites if site.scale_parameter]
    return (f"scale {span(known)}" if known else "scale not constant") + (
        f" ({joined(learned, 60)})" if learned else ""
    )


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
    axis = _AXES[norm.axis]
    return f"QK-Norm {KINDS[norm.kind]} {axis}{rope}{sides}"
