"""Norms and attention sites in a few words each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from normprobe.records import AttentionSite, NormSpec
from normprobe.report.wording import KINDS, number, plural

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
