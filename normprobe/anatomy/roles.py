"""The role of every norm: what it stands before, behind or on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from normprobe.records import AttentionSite, NormSite, Stream
from normprobe.records.anatomy import NormRole


def with_roles(
    norms: Sequence[NormSite], streams: Iterable[Stream], attention: Iterable[AttentionSite]
) -> tuple[NormSite, ...]:
    """The norm sites with their roles; a norm that no stream and no attention site names is `inner`."""
    roles: dict[str, NormRole] = {}
    for stream in streams:
        _assign(roles, stream.entry_norm, "embedding")
        _assign(roles, stream.final_norm, "final")
        for branch in stream.branches:
            _assign(roles, branch.pre_norm, "pre")
            _assign(roles, branch.output_norm, "output")
            _assign(roles, branch.post_norm, "post")
    for site in attention:
        if site.qk_norm is not None:
            _assign(roles, site.qk_norm.query, "query")
            _assign(roles, site.qk_norm.key, "key")
    return tuple(n.model_copy(update={"role": roles[n.path]}) if n.path in roles else n for n in norms)


def _assign(roles: dict[str, NormRole], path: str | None, role: NormRole) -> None:
    if path is not None:
        roles.setdefault(path, role)
