"""The cases of the zoo: each norm, how it is called, and the facts that hold for it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.zoo import (
    MAP,
    ROWS,
    WIDTH,
    BufferScale,
    Case,
    Frozen,
    HalfLayerNorm,
    LayerNorm,
    LearnedEps,
    PartialNorm,
    PinnedLayerNorm,
    Renormed,
    RMSNorm,
    Rule,
    adaptive,
    evolved,
    facts,
    foreign_norm,
    gated_inside,
    gated_outside,
    grn,
    grn_tokens,
    mean_square,
    ones,
    over_tokens,
    residual_inside,
    unbiased,
)

LN = facts("layernorm", "weight+bias", 1e-5, "inside_sqrt", "native", "fused")
RMS = facts("rmsnorm", "weight", 1e-6, "inside_sqrt", "float32", "after_cast")
TORCH = [
    Case("LayerNorm", lambda: nn.LayerNorm(WIDTH), {**LN, "axes": (-1,), "size": WIDTH, "subtracts_mean": True}),
    Case("LayerNorm-1e-12", lambda: nn.LayerNorm(WIDTH, eps=1e-12), {**LN, "eps": 1e-12}),
    Case(
        "LayerNorm-half-1e-12",
        lambda: nn.LayerNorm(WIDTH, eps=1e-12).half(),
        {**LN, "eps": 1e-12},
        dtype=torch.float16,
    ),
    Case("LayerNorm-no-bias", lambda: nn.LayerNorm(WIDTH, bias=False), {**LN, "affine": "weight"}),
    Case(
        "LayerNorm-plain",
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        {**LN, "affine": "none", "weight_multiply": "none"},
    ),
    Case("LayerNorm-3-axes", lambda: nn.LayerNorm([16, 6, 6]), {**LN, "axes": (-3, -2, -1)}, (MAP,)),
    Case("LayerNorm-one-row", lambda: nn.LayerNorm(WIDTH), LN, ((WIDTH,),)),
    Case("LayerNorm-meta", lambda: nn.LayerNorm(WIDTH, device="meta"), LN),
    Case("RMSNorm", lambda: nn.RMSNorm(WIDTH), {"kind": "rmsnorm", "eps": 1.192e-7, "affine": "weight"}),
    Case(
        "GroupNorm",
        lambda: nn.GroupNorm(4, 16),
        {**LN, "kind": "groupnorm", "groups": 4, "size": None},
        (MAP,),
    ),
    Case("GroupNorm-1", lambda: nn.GroupNorm(1, 16), {**LN, "kind": "groupnorm", "groups": 1}, (MAP,)),
    Case("GroupNorm-C", lambda: nn.GroupNorm(16, 16), {**LN, "kind": "groupnorm", "groups": 16}, (MAP,)),
    Case("GroupNorm-1-features", lambda: nn.GroupNorm(1, WIDTH), {**LN, "axes": (-1,)}, ((4, WIDTH),)),
    Case(
        "InstanceNorm",
        lambda: nn.InstanceNorm2d(16, affine=True),
        {**LN, "kind": "instancenorm", "axes": (-2, -1), "batch_dependent": False},
        (MAP,),
    ),
    Case(
        "InstanceNorm-stored",
        lambda: nn.InstanceNorm2d(16, track_running_stats=True),
        {"kind": "instancenorm", "eps": 1e-5, "frozen": False, "affine": "none"},
        (MAP,),
    ),
    *[
        Case(
            name,
            build,
            {**LN, "kind": "batchnorm", "batch_dependent": True, "frozen": False, "axes": axes},
            (shape,),
        )
        for name, build, shape, axes in (
            ("BatchNorm1d", lambda: nn.BatchNorm1d(WIDTH), (6, WIDTH), (0,)),
            ("BatchNorm1d-length", lambda: nn.BatchNorm1d(16), (2, 16, 9), (0, 2)),
            ("BatchNorm2d", lambda: nn.BatchNorm2d(16), MAP, (0, 2, 3)),
            ("BatchNorm2d-point", lambda: nn.BatchNorm2d(16), (1, 16, 1, 1), (0, 2, 3)),
            ("BatchNorm2d-line", lambda: nn.BatchNorm2d(16), (1, 16, 5, 1), (0, 2, 3)),
            ("BatchNorm3d", lambda: nn.BatchNorm3d(16), (2, 16, 3, 3, 3), (0, 2, 3, 4)),
            ("SyncBatchNorm", lambda: nn.SyncBatchNorm(16), MAP, (0, 2, 3)),
            ("BatchNorm-unstored", lambda: nn.BatchNorm2d(16, track_running_stats=False), MAP, (0, 2, 3)),
        )
    ],
    Case("LRN", lambda: nn.LocalResponseNorm(5, k=2.0), {"kind": "lrn", "size": 5, "affine": "none"}, (MAP,)),
    Case("Identity", nn.Identity, {"kind": "identity"}),
]
CUSTOM = [
    Case("lie", LayerNorm, {**RMS, "subtracts_mean": False}),
    Case(
        "outside",
        lambda: RMSNorm(1e-3, placement="outside_sqrt"),
        {**RMS, "eps": 1e-3, "eps_placement": "outside_sqrt"},
    ),
    Case("clamp", lambda: RMSNorm(1e-4, placement="clamp"), {**RMS, "eps": 1e-4, "eps_placement": "clamp"}),
    Case("scaled", lambda: RMSNorm(1e-5, placement="scaled"), {**RMS, "eps": 1e-5, "eps_placement": "scaled"}),
    Case("no-eps", lambda: RMSNorm(placement="none"), {**RMS, "eps": None, "eps_placement": "none"}),
    Case(
        "one-plus",
        lambda: RMSNorm(one_plus=True, multiply="before_cast"),
        {**RMS, "affine": "one_plus_weight", "weight_multiply": "before_cast"},
    ),
    Case("bfloat16", lambda: RMSNorm().bfloat16(), RMS, dtype=torch.bfloat16),
    Case(
        "float16-vanishing",
        lambda: HalfLayerNorm(1e-12).half(),
        facts("layernorm", "weight+bias", 1e-12, "inside_sqrt", "input", "after_cast"),
        dtype=torch.float16,
    ),
    Case("pinned", lambda: PinnedLayerNorm(WIDTH), {**LN, "reduction": "float32", "unbiased": False}),
    Case("learned-eps", LearnedEps, {"kind": "rmsnorm", "eps": 1e-4, "affine": "none"}),
    Case(
        "unbiased",
        lambda: Rule(unbiased, a=ones(WIDTH), b=ones(WIDTH)),
        {"kind": "layernorm", "affine": "weight+bias", "eps": 1e-6, "eps_placement": "outside_sqrt", "unbiased": True},
    ),
    Case(
        "normalize",
        lambda: Rule(lambda self, x: F.normalize(x, dim=-1)),
        {"kind": "l2norm", "affine": "none", "eps": 1e-12, "eps_placement": "clamp"},
    ),
    Case(
        "l2-gain",
        lambda: Rule(lambda self, x: x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() * self.g, g=ones(WIDTH)),
        {"kind": "l2norm", "affine": "weight", "eps": 1e-6, "eps_placement": "inside_sqrt", "weight": "g"},
    ),
    Case(
        "scalenorm",
        lambda: Rule(lambda self, x: self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5), g=ones(1)),
        {"kind": "scalenorm", "affine": "weight", "eps": 1e-5, "eps_placement": "clamp"},
    ),
    Case(
        "normalize-times-root",
        lambda: Rule(lambda self, x: F.normalize(x, dim=-1) * self.g * WIDTH**0.5, g=ones(WIDTH)),
        {"kind": "rmsnorm", "affine": "weight", "eps": 1e-12, "eps_placement": "clamp"},
    ),
    Case(
        "root-mean-square-clamped",
        lambda: Rule(lambda self, x: x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5).clamp(min=1e-8)),
        {"kind": "rmsnorm", "eps": 1e-8, "eps_placement": "clamp"},
    ),
    Case(
        "scalenorm-times-root",
        lambda: Rule(lambda self, x: F.normalize(x, dim=-1) * WIDTH**0.5 * self.g, g=ones(1)),
        {"kind": "scalenorm", "affine": "weight", "eps": 1e-12, "weight": "g"},
    ),
    Case(
        "masked",
        lambda: Rule(
            lambda self, x, mask: F.layer_norm(x, (WIDTH,), self.a, self.b) * mask[..., None],
            a=ones(WIDTH),
            b=ones(WIDTH),
        ),
        {"kind": "layernorm", "affine": "weight+bias", "bias": "b"},
        (ROWS, ROWS[:2]),
    ),
    Case(
        "foreign-operation",
        lambda: Rule(lambda self, x: foreign_norm(x, self.w), w=ones(WIDTH)),
        {"kind": "rmsnorm", "affine": "weight", "eps": 1e-6, "weight_multiply": "fused", "fused": True},
    ),
    Case(
        "per-head",
        lambda: Rule(lambda self, x: F.layer_norm(x, (8,)) * self.w, w=ones(4, 1, 8)),
        {"kind": "layernorm", "affine": "weight", "axes": (-1,), "size": 8},
        ((2, 4, 5, 8),),
    ),
    Case(
        "grouped",
        lambda: Rule(
            lambda self, x: F.rms_norm(x.unflatten(-1, (4, 8)), (8,), eps=1e-6).flatten(-2) * self.w,
            w=ones(WIDTH),
        ),
        {"kind": "rmsnorm", "groups": 4, "size": 8, "affine": "weight", "eps": 1e-6},
    ),
    Case("partial", PartialNorm, {"kind": "rmsnorm", "size": 20, "weight": "norm.weight", "eps": 1e-6}),
    Case(
        "pixel",
        lambda: Rule(lambda self, x: x * (x.pow(2).mean(1, keepdim=True) + 1e-8).rsqrt()),
        {"kind": "rmsnorm", "axes": (1,), "eps": 1e-8, "affine": "none"},
        (MAP,),
    ),
    Case(
        "gate-inside",
        lambda: Rule(gated_inside, w=ones(WIDTH)),
        {"kind": "rmsnorm", "affine": "weight", "eps": 1e-5},
        (ROWS, ROWS),
    ),
    Case(
        "gate-outside",
        lambda: Rule(gated_outside, w=ones(WIDTH)),
        {"kind": "rmsnorm", "affine": "weight", "eps": 1e-5},
        (ROWS, ROWS),
    ),
    Case(
        "residual-inside",
        lambda: Rule(residual_inside, w=ones(WIDTH)),
        {"kind": "rmsnorm", "affine": "weight", "eps": 1e-5},
        (ROWS, ROWS),
    ),
    Case(
        "constant-gain",
        lambda: Rule(lambda self, x: 0.5 * F.rms_norm(x, (WIDTH,))),
        {"kind": "rmsnorm", "affine": "other"},
    ),
    Case(
        "frozen",
        Frozen,
        {
            "kind": "batchnorm",
            "frozen": True,
            "affine": "weight+bias",
            "eps": 1e-5,
            "subtracts_mean": True,
            "batch_dependent": False,
            "weight": "weight",
            "bias": "bias",
        },
        (MAP,),
    ),
    Case("buffer-scale", BufferScale, {"kind": "affine", "affine": "weight", "weight": "scale"}),
    Case(
        "grn",
        lambda: Rule(grn, w=ones(1, 1, 1, 16), b=ones(1, 1, 1, 16)),
        {"kind": "grn", "affine": "weight+bias", "eps": 1e-6, "eps_placement": "outside_sqrt"},
        ((2, 6, 6, 16),),
    ),
    Case(
        "dyt",
        lambda: Rule(
            lambda self, x: torch.tanh(self.alpha * x) * self.w + self.b,
            alpha=ones(1),
            w=ones(WIDTH),
            b=ones(WIDTH),
        ),
        {"kind": "dyt", "affine": "weight+bias", "weight": "w", "bias": "b", "eps": None},
    ),
    Case(
        "dyt-alpha",
        lambda: Rule(lambda self, x: torch.tanh(self.alpha * x), alpha=ones(1)),
        {"kind": "dyt", "affine": "none"},
    ),
    Case(
        "dyt-erf",
        lambda: Rule(lambda self, x: torch.erf(self.alpha * x) * self.w, alpha=ones(1), w=ones(WIDTH)),
        {"kind": "dyt", "affine": "weight"},
    ),
    Case(
        "dyt-shifted-erf",
        lambda: Rule(
            lambda self, x: torch.erf(self.alpha * x + self.s) * self.w + self.b,
            alpha=ones(1),
            s=ones(1),
            w=ones(WIDTH),
            b=ones(WIDTH),
        ),
        {"kind": "dyt", "affine": "weight+bias", "weight": "w", "bias": "b"},
    ),
    Case(
        "dyt-one-plus",
        lambda: Rule(lambda self, x: torch.tanh(self.alpha * x) * (1 + self.w), alpha=ones(1), w=ones(WIDTH)),
        {"kind": "dyt", "affine": "one_plus_weight", "weight": "w"},
    ),
    Case(
        "dyt-hard",
        lambda: Rule(lambda self, x: torch.clamp(self.alpha * x, -1, 1) * self.w, alpha=ones(1), w=ones(WIDTH)),
        {"kind": "dyt", "affine": "weight", "weight": "w"},
    ),
    Case(
        "grn-tokens",
        lambda: Rule(grn_tokens, w=ones(WIDTH), b=ones(WIDTH)),
        {"kind": "grn", "affine": "weight+bias", "eps": 1e-6, "axes": (1,)},
    ),
    Case(
        "statistics-of-a-part",
        lambda: Rule(lambda self, x: self.w * x / (mean_square(x[..., :8]).sqrt() + 1e-8), w=ones(WIDTH)),
        {"kind": "unknown"},
    ),
    Case("mean-absolute", lambda: Rule(lambda self, x: x / x.abs().mean(-1, keepdim=True)), {"kind": "unknown"}),
    Case(
        "peak",
        lambda: Rule(lambda self, x: self.w * x / x.abs().amax(-1, keepdim=True), w=ones(WIDTH)),
        {"kind": "unknown", "affine": "weight", "eps_placement": "unknown", "weight": "w"},
    ),
    Case(
        "one-group-of-tokens",
        lambda: Rule(over_tokens, w=ones(WIDTH), b=ones(WIDTH)),
        {"kind": "groupnorm", "groups": 1, "affine": "weight+bias", "axes": (-2, -1), "size": None},
    ),
    Case("adaptive", lambda: Rule(adaptive), {"kind": "instancenorm", "eps": 1e-5, "axes": (-2, -1)}, (MAP, MAP)),
    Case("renormed", Renormed, {"kind": "batchnorm", "frozen": False, "eps": 1e-5}, (MAP,)),
    Case(
        "deviation-behind-a-gate",
        lambda: Rule(evolved, w=ones(16), b=ones(16), v=ones(16)),
        {"kind": "unknown", "affine": "weight+bias", "weight": "w", "bias": "b", "groups": 4, "axes": (-3, -2, -1)},
        (MAP,),
    ),
]


def transformers_cases() -> list[Case]:
    """Norms of transformers, imported only when asked for."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN, ConvNextV2LayerNorm
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
    from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d
    from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    scale = SimpleNamespace(layerscale_value=1.0, hidden_size=WIDTH)
    before = {"reduction": "float32", "weight_multiply": "before_cast"}
    return [
        Case("Llama", lambda: LlamaRMSNorm(WIDTH), RMS),
        Case("Llama-half", lambda: LlamaRMSNorm(WIDTH, 1e-5).half(), {**RMS, "eps": 1e-5}, dtype=torch.float16),
        Case("T5", lambda: T5LayerNorm(WIDTH), RMS),
        Case("Gemma", lambda: GemmaRMSNorm(WIDTH), {**RMS, **before, "affine": "one_plus_weight"}),
        Case("OLMo2", lambda: Olmo2RMSNorm(WIDTH), {**RMS, **before}),
        Case(
            "OLMo",
            lambda: OlmoLayerNorm(WIDTH),
            {**LN, "affine": "none", "reduction": "float32", "weight_multiply": "none"},
        ),
        Case(
            "DeBERTa",
            lambda: DebertaLayerNorm(WIDTH, 1e-7),
            {**LN, "eps": 1e-7, "reduction": "float32", "weight_multiply": "after_cast"},
        ),
        Case(
            "Cohere-heads",
            lambda: CohereLayerNorm((4, 8)),
            {**LN, **before, "affine": "weight", "size": 8},
            ((2, 5, 4, 8),),
        ),
        Case(
            "ConvNeXt-first",
            lambda: ConvNextV2LayerNorm(16, data_format="channels_first"),
            {**LN, "eps": 1e-6, "axes": (1,)},
            (MAP,),
        ),
        Case(
            "ConvNeXt-GRN",
            lambda: ConvNextV2GRN(16),
            {"kind": "grn", "eps": 1e-6, "affine": "weight+bias"},
            ((2, 6, 6, 16),),
        ),
        Case(
            "DETR",
            lambda: DetrFrozenBatchNorm2d(16),
            {"kind": "batchnorm", "frozen": True, "eps": 1e-5, "affine": "weight+bias"},
            (MAP,),
        ),
        Case(
            "LayerScale",
            lambda: Dinov2LayerScale(scale),
            {"kind": "affine", "affine": "weight", "weight": "lambda1"},
        ),
    ]
