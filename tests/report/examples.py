"""Documents as a probe writes them: healthy, faulty, not finite, empty, and with several streams."""

from __future__ import annotations

import math

from normprobe.checks.catalogue import ranked
from normprobe.records import (
    Anatomy,
    Basis,
    BranchGradient,
    BranchScale,
    Finding,
    GradientMeasure,
    Head,
    MassiveActivation,
    Measurements,
    QKNorm,
    ReportData,
    Severity,
    Skipped,
    Target,
)
from tests.report.builders import INF, NAN, logits, measured, norm, norms_of, site, stream

VERSIONS = {"normprobe": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}


def clean() -> ReportData:
    """A healthy small Llama of 30 blocks, with the massive activations that such models have."""
    one = stream()
    sites = tuple(site(f"model.layers.{block}.self_attn") for block in range(30))
    rms = [0.131 * (write + 1) ** 0.83 * (1 + 0.1 * math.sin(write)) for write in range(60)]
    peaks = [0.9 + 0.1 * write if write < 5 else 1220.0 + write for write in range(60)]
    massive = MassiveActivation(channel=45, position=0, value=1274.0, ratio=3950.0, share=0.98, first=5, last=59)
    return ReportData(
        target=Target(
            name="HuggingFaceTB/SmolLM2-135M",
            source="hub",
            class_name="LlamaForCausalLM",
            parameters=134_515_008,
            dtype="float32",
            device="cpu",
            inputs="bundled sample text, 512 tokens",
        ),
        versions=VERSIONS,
        anatomy=Anatomy(
            norms=tuple(norms_of(one)),
            streams=(one,),
            attention=sites,
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
                code="NP303",
                name="massive-activations",
                severity=Severity.NOTE,
                where="model.layers",
                message="channel 45 of the stream reaches 1274 at position 0, 3950 times the median |x|, "
                "from write 6 to write 60. Trained language models do this; mind it when quantising.",
                value=3950.0,
                limit=1000.0,
                unit="",
                source="Sun et al. 2024, sec. 2",
            ),
        ),
        skipped=(
            Skipped(what="gradients", why="no backward pass was asked for (--backward)"),
            Skipped(what="NP114", why="no optimizer was given"),
        ),
        notes=("bundled sample text, 512 tokens", "rotary caches were left as they are"),
    )


def faulty() -> ReportData:
    """Twelve blocks without a final norm, norms that reduce in float16, and unresolved logits."""
    one = stream("transformer.h", 12, width=768, final=None)
    sites = tuple(
        site(f"transformer.h.{block}.attn", 12, 12, window=None if block % 2 else 1024) for block in range(12)
    )
    rms = [0.4 * 1.32**write for write in range(24)]
    tops = [9 * 1.2**block for block in range(12)]
    norms = norms_of(one, "layernorm", 1e-5, reduction="input", subtracts_mean=True, affine="weight+bias")
    over = [
        Finding(
            code="NP401",
            name="unresolved-logits",
            severity=Severity.WARNING,
            where=f"transformer.h.{block}.attn",
            message=f"the largest attention logit is {tops[block]:.1f}: a softmax over such logits is close "
            "to one-hot, and its gradient close to zero.",
            value=tops[block],
            limit=50.0,
            unit="logit",
            source="Wortsman et al. 2023, sec. 3.1",
            fix="AddQKNorm",
        )
        for block in (10, 11)
    ]
    return ReportData(
        target=Target(
            name="checkpoints/run-17/step-020000",
            source="folder",
            class_name="GPT2LMHeadModel",
            parameters=124_439_808,
            dtype="float16",
            device="cuda:0",
            inputs="--text, 96 tokens",
            revision=None,
        ),
        level="backward",
        versions=VERSIONS,
        anatomy=Anatomy(
            norms=(*norms, norm("transformer.ln_f", "unused", "layernorm", executed=False)),
            streams=(one,),
            attention=sites,
        ),
        measurements=Measurements(
            residual=(measured(one, rms, [value * 11 for value in rms]),),
            attention=tuple(
                logits(s.path, [tops[block] - head for head in range(12)]) for block, s in enumerate(sites)
            ),
            gradients=GradientMeasure(
                loss="cross-entropy of the next token",
                value=9.87,
                basis=Basis(unit="nat", dtype="float32", count=95),
                branches=tuple(
                    BranchGradient(
                        stream=one.name,
                        branch=index,
                        path=branch.path,
                        kind=branch.kind,
                        parameter_norm=4.0 * 0.82**index,
                        activation_rms=1e-4,
                        parameters=2_360_000,
                    )
                    for index, branch in enumerate(one.branches)
                ),
                last_to_first=0.82**23,
                slope=-0.198,
            ),
            output_finite=True,
        ),
        findings=ranked(
            (
                Finding(
                    code="NP201",
                    name="missing-final-norm",
                    severity=Severity.ERROR,
                    where="transformer.h",
                    message="the pre-norm stream reaches the head without a final norm; its RMS there is 237.",
                    value=237.0,
                    limit=None,
                    unit="",
                    source="docs/calibration.md#np201",
                    fix="AddFinalNorm",
                ),
                Finding(
                    code="NP106",
                    name="half-precision-reduction",
                    severity=Severity.ERROR,
                    where="transformer.h.0.input_layernorm",
                    places=tuple(n.path for n in norms),
                    message="the norm sums its squares in float16, which overflows from |x| = 256 on.",
                    value="float16",
                    limit="float32",
                    unit="",
                    source="choice",
                    fix="UpcastNorms",
                ),
                *over,
                Finding(
                    code="NP208",
                    name="unused-norm",
                    severity=Severity.WARNING,
                    where="transformer.ln_f",
                    message="the module was built but never ran; its parameters take part in nothing.",
                    value=0.0,
                    limit=1.0,
                    unit="execution",
                    source="choice",
                ),
            )
        ),
        skipped=tuple(
            Skipped(
                what=f"transformer.h.{block}.attn: entropy by key",
                why="the fused kernel keeps no probabilities",
            )
            for block in range(12)
        ),
    )


def not_finite() -> ReportData:
    """A stream that overflows in the middle of its depth, with text and paths that need escaping."""
    one = stream("net.blocks", 6, width=64, final=None, needs=None, final_norm_reason="the head was not found")
    rms = [1.0, 3.0, 9.0, 40.0, INF, *([NAN] * 7)]
    return ReportData(
        target=Target(name="<b>evil</b>&.py:build", class_name="Net", parameters=9000, dtype="float16", device="cpu"),
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
                code="NP504",
                name="non-finite",
                severity=Severity.ERROR,
                where="net.blocks.2#aten.add.Tensor:0",
                message="the sum of trunk and branch is not finite, but both are; <script> & co. stay text.",
                value=INF,
                limit=65504.0,
                source="IEEE 754-2019, binary16",
            ),
        ),
    )


def empty() -> ReportData:
    """A module without norms, streams, attention or measurements."""
    return ReportData(target=Target(class_name="Linear", parameters=72), level="structure")


def three_streams() -> ReportData:
    """A vision tower, a post-norm encoder, a decoder with cross-attention, QK-Norm and scales."""
    tower = stream(
        "vision_tower.encoder.layers",
        4,
        width=96,
        final=None,
        needs=False,
        final_norm_reason="features are taken at layer -2",
    )
    encoder = stream("encoder.layers", 3, width=128, placement="post", final=None, needs=False)
    decoder = stream(
        "decoder.layers",
        3,
        width=128,
        final="decoder.final_layer_norm",
        kinds=("attention", "cross_attention", "mlp"),
        input_multiplier=11.3,
    )
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
    qk = QKNorm(kind="rmsnorm", axis="head", query="decoder.q_norm", key="decoder.layers.0.k_norm", rope="before")
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
        *tower_norms,
        *norms_of(encoder, "layernorm", 1e-12),
        *norms_of(decoder, eps=1e-6),
        norm("embeddings.norm", "embedding", "layernorm", 1e-12),
        norm("decoder.layers.0.k_norm", "key", eps=1e-6),
    )
    return ReportData(
        target=Target(name="three/streams", class_name="Everything", parameters=1_240_000_000, dtype="bfloat16"),
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
