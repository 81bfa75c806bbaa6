"""Documents as a probe writes them: healthy, faulty, not finite, empty, and with several streams."""

from __future__ import annotations

import math

from normprobe.records import (
    Anatomy,
    AttentionMeasure,
    AttentionSite,
    Basis,
    Branch,
    BranchGradient,
    BranchScale,
    Finding,
    GradientMeasure,
    Growth,
    Head,
    HeadLogits,
    MassiveActivation,
    Measurements,
    NormSite,
    OpSite,
    QKNorm,
    ReportData,
    Severity,
    Skipped,
    Stream,
    StreamMeasure,
    StreamState,
    Target,
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
    return Stream.model_validate(
        {"name": name, "branches": branches, "needs_final_norm": needs} | fields | more
    )


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
        branch=index, path=branch.path, block=branch.block, kind=branch.kind,
        rms_median=rms, rms_p99=rms * 3, rms_max=rms * 9, rms_argmax=0, position=0,
        abs_max=abs_max, abs_argmax_channel=45, write_ratio=0.4, finite=finite,
    )  # fmt: skip


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
    return Growth(
        exponent=slope, interval=(slope - error, slope + error), r_squared=r_squared, writes=len(rms)
    )


def measured(one: Stream, rms: list[float], abs_max: list[float], **more: object) -> StreamMeasure:
    states = tuple(state(one, index, *pair) for index, pair in enumerate(zip(rms, abs_max, strict=True)))
    basis = Basis(unit="1", dtype="float32", count=512)
    fields = {
        "stream": one.name,
        "basis": basis,
        "entry_rms": rms[0] * 0.9,
        "states": states,
        "growth": fitted(rms),
    }
    return StreamMeasure.model_validate(fields | more)


def logits(path: str, tops: list[float]) -> AttentionMeasure:
    heads = tuple(
        HeadLogits(
            head=index, sampled_max=top, bound=abs(top) * 1.6 + 1, std=abs(top) / 5,
            entropy=1 / (1 + abs(top) / 10), saturated=0.7 if top > 40 else 0.01, first_token=0.62 if index % 2 else 0.1,
        )
        for index, top in enumerate(tops)
    )  # fmt: skip
    return AttentionMeasure(
        path=path, basis=Basis(unit="logit", dtype="float32", count=64, exact=False), rows=64, heads=heads
    )


VERSIONS = {"normprobe": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}


def clean() -> ReportData:
    """A healthy small Llama of 30 blocks, with the massive activations that such models have."""
    one = stream()
    sites = tuple(site(f"model.layers.{block}.self_attn") for block in range(30))
    rms = [0.131 * (write + 1) ** 0.83 * (1 + 0.1 * math.sin(write)) for write in range(60)]
    peaks = [0.9 + 0.1 * write if write < 5 else 1220.0 + write for write in range(60)]
    massive = MassiveActivation(channel=45, position=0, value=1274.0, ratio=3950.0, first=5, last=59)
    return ReportData(
        target=Target(
            name="HuggingFaceTB/SmolLM2-135M", source="hub", class_name="LlamaForCausalLM", parameters=134_515_008,
            dtype="float32", device="cpu", inputs="bundled sample text, 512 tokens",
        ),
        versions=VERSIONS,
        anatomy=Anatomy(
            norms=tuple(norms_of(one)), streams=(one,), attention=sites,
            head=Head(path="lm_head", tied_to="model.embed_tokens.weight"),
        ),
        measurements=Measurements(
            residual=(measured(one, rms, peaks, massive=(massive,)),),
            attention=tuple(
                logits(s.path, [8 + 5 * math.sin(block / 4) + head for head in range(9)])
                for block, s in enumerate(sites)
            ),
            output_finite=True,
        ),
        findings=(
            Finding(
                code="NP303", name="massive-activations", severity=Severity.NOTE, where="model.layers",
                message="channel 45 of the stream reaches 1274 at position 0, 3950 times the median |x|, from write 6 to "
                "write 60. Trained language models do this; keep it in mind for quantisation.",
                value=3950.0, limit=1000.0, unit="", source="Sun et al. 2024, sec. 2",
            ),
        ),
        skipped=(
            Skipped(what="gradients", why="no backward pass was asked for (--backward)"),
            Skipped(what="NP114", why="no optimizer was given"),
        ),
        notes=("bundled sample text, 512 tokens", "rotary caches were left as they are"),
    )  # fmt: skip


def faulty() -> ReportData:
    """Twelve blocks without a final norm, float16 norms that reduce in float16, logits beyond what softmax resolves."""
    one = stream("transformer.h", 12, width=768, final=None)
    sites = tuple(
        site(f"transformer.h.{block}.attn", 12, 12, window=None if block % 2 else 1024) for block in range(12)
    )
    rms = [0.4 * 1.32**write for write in range(24)]
    tops = [9 * 1.2**block for block in range(12)]
    norms = norms_of(one, "layernorm", 1e-5, reduction="input", subtracts_mean=True, affine="weight+bias")
    over = [
        Finding(
            code="NP401", name="unresolved-logits", severity=Severity.WARNING, where=f"transformer.h.{block}.attn",
            message=f"the largest attention logit is {tops[block]:.1f}: a softmax over such logits is close to one-hot, and "
            "its gradient close to zero.",
            value=tops[block], limit=50.0, unit="logit", source="Wortsman et al. 2023, sec. 3.1", fix="AddQKNorm",
        )
        for block in (10, 11)
    ]  # fmt: skip
    return ReportData(
        target=Target(
            name="checkpoints/run-17/step-020000", source="folder", class_name="GPT2LMHeadModel",
            parameters=124_439_808, dtype="float16", device="cuda:0", inputs="--text, 96 tokens", revision=None,
        ),
        level="backward",
        versions=VERSIONS,
        anatomy=Anatomy(norms=(*norms, norm("transformer.ln_f", "unused", "layernorm", executed=False)), streams=(one,), attention=sites),
        measurements=Measurements(
            residual=(measured(one, rms, [value * 11 for value in rms]),),
            attention=tuple(
                logits(s.path, [tops[block] - head for head in range(12)]) for block, s in enumerate(sites)
            ),
            gradients=GradientMeasure(
                loss="cross-entropy of the next token", value=9.87, basis=Basis(unit="nat", dtype="float32", count=95),
                branches=tuple(
                    BranchGradient(
                        stream=one.name, branch=index, path=branch.path, kind=branch.kind,
                        parameter_norm=4.0 * 0.82**index, activation_rms=1e-4, parameters=2_360_000,
                    )
                    for index, branch in enumerate(one.branches)
                ),
                last_to_first=0.82**23, slope=-0.198,
            ),
            output_finite=True,
        ),
        findings=(
            Finding(
                code="NP201", name="missing-final-norm", severity=Severity.ERROR, where="transformer.h",
                message="the pre-norm stream reaches the head without a final norm; its RMS there is 237.",
                value=237.0, limit=None, unit="", source="docs/calibration.md#np201", fix="AddFinalNorm",
            ),
            Finding(
                code="NP106", name="half-precision-reduction", severity=Severity.ERROR, where="transformer.h.0.input_layernorm",
                places=tuple(n.path for n in norms),
                message="the norm sums its squares in float16, which overflows from |x| = 256 on.",
                value="float16", limit="float32", unit="", source="choice", fix="UpcastNorms",
            ),
            *over,
            Finding(
                code="NP208", name="unused-norm", severity=Severity.WARNING, where="transformer.ln_f",
                message="the module was built but never ran; its parameters take part in nothing.",
                value=0.0, limit=1.0, unit="execution", source="choice",
            ),
        ),
        skipped=tuple(
            Skipped(what=f"transformer.h.{block}.attn: entropy by key", why="the fused kernel keeps no probabilities")
            for block in range(12)
        ),
    )  # fmt: skip


def not_finite() -> ReportData:
    """A stream that overflows in the middle of its depth, with text and paths that need escaping."""
    one = stream(
        "net.blocks", 6, width=64, final=None, needs=None, final_norm_reason="the head was not found"
    )
    rms = [1.0, 3.0, 9.0, 40.0, INF, *([NAN] * 7)]
    return ReportData(
        target=Target(
            name="<b>evil</b>&.py:build", class_name="Net", parameters=9000, dtype="float16", device="cpu"
        ),
        versions=VERSIONS,
        anatomy=Anatomy(norms=tuple(norms_of(one, eps=1e-8)), streams=(one,)),
        measurements=Measurements(
            residual=(measured(one, rms, [rms_ * 4 for rms_ in rms]),),
            attention=(logits("net.blocks.2.attn", [NAN, 3.0]),),
            output_finite=False,
            first_non_finite="net.blocks.2#aten.add.Tensor:0",
        ),
        findings=(
            Finding(
                code="NP504", name="non-finite", severity=Severity.ERROR, where="net.blocks.2#aten.add.Tensor:0",
                message="the sum of trunk and branch is not finite although both are; <script> & co. stay text.",
                value=INF, limit=65504.0, source="IEEE 754-2019, binary16",
            ),
        ),
    )  # fmt: skip


def empty() -> ReportData:
    """A module without norms, streams, attention or measurements."""
    return ReportData(target=Target(class_name="Linear", parameters=72), level="structure")


def three_streams() -> ReportData:
    """A vision tower, an encoder with post-norm, and a decoder with cross-attention, QK-Norm and scaled branches."""
    tower = stream(
        "vision_tower.encoder.layers", 4, width=96, final=None, needs=False,
        final_norm_reason="features are taken at layer -2",
    )  # fmt: skip
    encoder = stream("encoder.layers", 3, width=128, placement="post", final=None, needs=False)
    decoder = stream(
        "decoder.layers", 3, width=128, final="decoder.final_layer_norm",
        kinds=("attention", "cross_attention", "mlp"), input_multiplier=11.3,
    )  # fmt: skip
    scaled = tuple(
        branch.model_copy(
            update={
                "skip_scale": 1.19,
                "branch_scale": BranchScale(kind="channel", parameter=f"{branch.path}.gamma"),
            }
        )
        for branch in decoder.branches
    )
    decoder = decoder.model_copy(update={"branches": scaled})
    qk = QKNorm(
        kind="rmsnorm", axis="head", query="decoder.q_norm", key="decoder.layers.0.k_norm", rope="before"
    )
    streams = (tower, encoder, decoder)
    attention = (
        *(site(f"vision_tower.encoder.layers.{b}.self_attn", 3, 3, 32, causal=False) for b in range(4)),
        *(site(f"encoder.layers.{b}.self_attn", 4, 4, 32, causal=False) for b in range(3)),
        *(site(f"decoder.layers.{b}.self_attn", 4, 2, 32, qk_norm=qk, window=64) for b in range(3)),
        *(site(f"decoder.layers.{b}.cross", 4, 4, 32, cross=True, softcap=50.0) for b in range(3)),
        site("pooler.attention", 1, 1, 128, scale=None),
    )
    tower_norms = norms_of(tower, "layernorm", 1e-6)
    norms = (
        *tower_norms, *norms_of(encoder, "layernorm", 1e-12), *norms_of(decoder, eps=1e-6),
        norm("embeddings.norm", "embedding", "layernorm", 1e-12), norm("decoder.layers.0.k_norm", "key", eps=1e-6),
    )  # fmt: skip
    return ReportData(
        target=Target(
            name="three/streams", class_name="Everything", parameters=1_240_000_000, dtype="bfloat16"
        ),
        anatomy=Anatomy(norms=norms, streams=streams, attention=attention),
        measurements=Measurements(
            residual=(
                measured(tower, [1.0 + 0.2 * w for w in range(8)], [5.0 + w for w in range(8)]),
                measured(encoder, [1.0] * 6, [3.0] * 6),
                measured(decoder, [11.3 * 1.05**w for w in range(9)], [60.0] * 9),
            ),
            attention=tuple(logits(s.path, [4.0, 6.0 - i, -2.0]) for i, s in enumerate(attention)),
            output_finite=True,
        ),
        notes=("random weights (seed 0)",),
    )


ALL = {
    "clean": clean,
    "faulty": faulty,
    "not_finite": not_finite,
    "empty": empty,
    "three_streams": three_streams,
}
