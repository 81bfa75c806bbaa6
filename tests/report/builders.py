"""Small builders of records, with the fields that a report reads."""

from __future__ import annotations

import math

from normprobe.records import (
    AttentionMeasure,
    AttentionSite,
    Basis,
    Branch,
    Growth,
    HeadLogits,
    Margins,
    NormSite,
    OpSite,
    Stream,
    StreamMeasure,
    StreamState,
)

NAN, INF = math.nan, math.inf


def norm(path: str, role: str = "pre", kind: str = "rmsnorm", eps: float = 1e-5, **more: object) -> NormSite:
    fields = {"eps_placement": "inside_sqrt", "affine": "weight", "executions": 1} | more
    return NormSite.model_validate({"path": path, "role": role, "kind": kind, "eps": eps} | fields)


def stream(
    name: str = "model.layers",
    blocks: int = 30,
    *,
    width: int = 576,
    placement: str = "pre",
    final: str | None = "model.norm",
    needs: bool | None = True,
    kinds: tuple[str, ...] = ("attention", "mlp"),
    **more: object,
) -> Stream:
    norms = ("input_layernorm", "post_attention_layernorm", "third_layernorm")
    where = "post_norm" if placement == "post" else "pre_norm"
    branches = [
        Branch.model_validate(
            {
                "path": f"{name}.{block}",
                "block": f"{name}.{block}",
                "kind": kind,
                "placement": placement,
                where: f"{name}.{block}.{norms[order]}",
                "add": OpSite(path=f"{name}.{block}", op="aten.add.Tensor", ordinal=order),
            }
        )
        for block in range(blocks)
        for order, kind in enumerate(kinds)
    ]
    fields = {"width": width, "depth": len(branches), "placement": placement, "final_norm": final}
    return Stream.model_validate({"name": name, "branches": branches, "needs_final_norm": needs} | fields | more)


def norms_of(one: Stream, kind: str = "rmsnorm", eps: float = 1e-5, **more: object) -> list[NormSite]:
    paths = [branch.pre_norm or branch.post_norm or "" for branch in one.branches]
    role = "post" if one.placement == "post" else "pre"
    ends = [norm(one.final_norm, "final", kind, eps, **more)] if one.final_norm else []
    return [*(norm(path, role, kind, eps, **more) for path in paths), *ends]


def site(path: str, heads: int = 9, kv: int = 3, size: int = 64, **more: object) -> AttentionSite:
    fields = {"scale": size**-0.5, "causal": True, "kernel": "sdpa"} | more
    where = OpSite(path=path, op="aten.scaled_dot_product_attention")
    return AttentionSite.model_validate(
        {"path": path, "heads": heads, "kv_heads": kv, "head_dim": size, "site": where} | fields
    )


def state(one: Stream, index: int, rms: float, abs_max: float) -> StreamState:
    branch = one.branches[index]
    finite = math.isfinite(rms)
    return StreamState(
        branch=index,
        path=branch.path,
        block=branch.block,
        kind=branch.kind,
        rms_median=rms,
        rms_p99=rms * 3,
        rms_max=rms * 9,
        rms_argmax=0,
        position=0,
        abs_max=abs_max,
        abs_argmax_channel=45,
        mean=0.0,
        std=rms,
        first_rms=rms,
        other_rms=rms,
        token_cosine=0.1,
        stable_rank=4.0,
        write_rms=0.4 * rms,
        write_max=0.4 * rms,
        write_ratio=0.4,
        write_share=0.3,
        write_cosine=0.1,
        angle=0.3,
        bf16_loss=0.004,
        fp16_loss=0.0005,
        finite=finite,
    )


def fitted(rms: list[float]) -> Growth:
    """Least squares of ln rms on ln write, with an interval of two standard errors."""
    if len(rms) < 4 or not all(map(math.isfinite, rms)):
        return Growth(exponent=NAN, interval=(NAN, NAN), r_squared=NAN, writes=len(rms))
    x = [math.log(write) for write in range(1, len(rms) + 1)]
    y = [math.log(value) for value in rms]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    left = sum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - y_mean) ** 2 for b in y)
    error = 2 * math.sqrt(left / (len(x) - 2) / spread)
    r_squared = 1 - left / total if total else NAN
    return Growth(exponent=slope, interval=(slope - error, slope + error), r_squared=r_squared, writes=len(rms))


def measured(one: Stream, rms: list[float], abs_max: list[float], **more: object) -> StreamMeasure:
    states = tuple(state(one, index, *pair) for index, pair in enumerate(zip(rms, abs_max, strict=True)))
    basis = Basis(unit="1", dtype="float32", count=512)
    fields = {
        "stream": one.name,
        "basis": basis,
        "entry_rms": rms[0] * 0.9,
        "entry_cosine": 0.1,
        "states": states,
        "growth": fitted(rms),
        "independent_rms": rms[-1],
        "effective_depth": float(len(rms)),
    }
    return StreamMeasure.model_validate(fields | more)


def logits(path: str, tops: list[float]) -> AttentionMeasure:
    heads = tuple(
        HeadLogits(
            head=index,
            sampled_max=top,
            bound=abs(top) * 1.6 + 1,
            std=abs(top) / 5,
            entropy=1 / (1 + abs(top) / 10),
            saturated=0.7 if top > 40 else 0.01,
            first_token=0.62 if index % 2 else 0.1,
            uncapped_max=top,
            q_rms=1.0,
            k_rms=1.0,
            margins=Margins(std=0.0, entropy=0.0, saturated=0.0, first_token=0.0),
        )
        for index, top in enumerate(tops)
    )
    return AttentionMeasure(
        path=path, basis=Basis(unit="logit", dtype="float32", count=64, exact=False), rows=64, heads=heads
    )
