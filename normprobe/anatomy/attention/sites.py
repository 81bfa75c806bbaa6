"""Attention sites: heads, scale in force, soft cap, QK-Norm, and the weight rows behind each head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from normprobe.anatomy.attention.head_rows import Rows, head_rows
from normprobe.anatomy.attention.norms import qk_norm, site_of
from normprobe.anatomy.attention.ops import AttentionOp
from normprobe.anatomy.attention.reach import reach
from normprobe.anatomy.attention.sides import Side, trace_side
from normprobe.anatomy.flow.along import parted
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import AttentionSite, NormSite

Operand = Literal["q", "k", "v"]


@dataclass(frozen=True)
class ReadSite:
    """One attention site, with the norm steps on its query and key, and why rows of an operand are not known."""

    record: AttentionSite
    query_norms: tuple[Step, ...]
    key_norms: tuple[Step, ...]
    unknown: tuple[tuple[Operand, str], ...]


def read_attention(flow: Flow, op: AttentionOp, norms: list[NormSite]) -> ReadSite:
    """Everything that the data flow tells about one attention operation."""
    query, key, value = (trace_side(flow, v) for v in (op.query, op.key, op.value))
    found = _rows(flow, op, (query, key, value))
    rows = {name: one for name, one in found.items() if isinstance(one, Rows)}
    heads = len(rows["q"].sets) if "q" in rows else _heads(flow, op, query, rows.get("k"))
    causal, window = (True, None) if op.causal else reach(op.hidden, *op.places)
    record = AttentionSite(
        path=op.site.path,
        heads=heads,
        kv_heads=len(rows["k"].sets) if "k" in rows else _kv_heads(flow, op, heads),
        head_dim=flow.shape(op.query)[-1],
        **_scaling(op, query, key),
        softcap=op.softcap,
        causal=causal,
        window=window,
        sinks=op.hidden.sinks is not None,
        sink_columns=op.hidden.sinks,
        biased=op.hidden.biased,
        kernel=op.kernel,
        tokens=op.places,
        qk_norm=qk_norm(flow, op, (query, key), norms),
        columns={name: one.at(rows.get("q")) for name, one in rows.items()},
        site=op.site,
        product=op.multiplied,
    )
    query_norms, key_norms = (side.norms if site_of(side, norms) is not None else () for side in (query, key))
    unknown = tuple((name, one) for name, one in found.items() if isinstance(one, str))
    return ReadSite(record, query_norms, key_norms, unknown)


def _scaling(op: AttentionOp, query: Side, key: Side) -> dict[str, Any]:
    """The factor on q·kᵀ, and what is known of a learned one."""
    learned = op.learned.beside(query.learned, key.learned)
    return {
        "scale": _scale(op.factor, query.factor, key.factor),
        "scale_parameter": next(iter(learned.parameters), None),
        "scale_bounded": learned.bounded if learned.parameters else None,
    }


def _scale(*factors: float | None) -> float | None:
    """The product of all factors; None where one is not constant."""
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _rows(flow: Flow, op: AttentionOp, sides: tuple[Side, Side, Side]) -> dict[Operand, Rows | str]:
    query, key, value = sides
    return {
        "q": head_rows(flow, op.query, query, -1),
        "k": head_rows(flow, op.key, key, op.across[0]),
        "v": head_rows(flow, op.value, value, op.across[1]),
    }


def _heads(flow: Flow, op: AttentionOp, query: Side, keys: Rows | None) -> int:
    """Query heads: as many places as the rows behind the keys differ by, where queries have the same places (and were
    pooled, say); the second of four axes; of others as many as the query's features are parted into, or of three the
    first without the batch, which the projection's output has."""
    shape = flow.shape(op.query)
    if keys is not None and keys.places.shape[:-1] == shape[:-2] and len(keys.sets) > 1:
        return keys.varied()
    if len(shape) == 4:
        return shape[1]
    if (told := parted(flow, op.query)) is not None:
        return told
    batch = flow.shape(query.projection.outputs[0])[0] if query.projection is not None else 1
    for step, _ in query.moves:
        source = flow.shape(step.inputs[0])
        if len(source) == 4 and shape[0] in (source[0] * source[1], source[0] * source[2]):
            batch = source[0]
    return shape[0] // batch if shape[0] % batch == 0 else 1


def _kv_heads(flow: Flow, op: AttentionOp, heads: int) -> int:
    shape = flow.shape(op.key)
    return shape[1] if len(shape) == 4 else heads
