"""What each tiny architecture is built of, written down from its definition; `{i}` stands for the layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.models import HEADS, LAYERS, WIDTH

HEAD_DIM = WIDTH // HEADS
ROOT = HEAD_DIM**-0.5


@dataclass(frozen=True)
class NormFacts:
    kind: str
    affine: str
    eps: float


LAYERNORM = NormFacts("layernorm", "weight+bias", 1e-5)
BERT_NORM = NormFacts("layernorm", "weight+bias", 1e-12)
RMSNORM = NormFacts("rmsnorm", "weight", 1e-6)
OLMO_NORM = NormFacts("rmsnorm", "weight", 1e-5)
GEMMA_NORM = NormFacts("rmsnorm", "one_plus_weight", 1e-6)


@dataclass(frozen=True)
class BranchFacts:
    """One branch of every block; norms, readers and writers are paths below the block."""

    kind: str
    placement: str
    readers: tuple[str, ...]
    writers: tuple[str, ...]
    pre: str | None = None
    output: str | None = None
    post: str | None = None
    parallel: bool = False


@dataclass(frozen=True)
class StreamFacts:
    name: str
    branches: tuple[BranchFacts, ...]
    final: str | None = None
    needed: bool = True
    entry: str | None = None
    multiplier: float = 1.0


@dataclass(frozen=True)
class AttentionFacts:
    kv_heads: int = HEADS
    scale: float = ROOT
    softcap: float | None = None
    qk_axis: str | None = None


@dataclass(frozen=True)
class Facts:
    """`others` are norms outside the streams with their roles, `below` those inside the branches of every block."""

    norm: NormFacts
    streams: tuple[StreamFacts, ...]
    attention: AttentionFacts = AttentionFacts()
    sites: int = LAYERS
    head: str | None = "lm_head.weight"
    tied: str | None = None
    softcap: float | None = None
    logits: float = 1.0
    others: dict[str, str] = field(default_factory=dict)
    below: dict[str, str] = field(default_factory=dict)


def both(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


def weights(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = (weights("mlp.gate_proj", "mlp.up_proj"), weights("mlp.down_proj"))
SELF = (weights(*QKV), weights("self_attn.o_proj"))


def llama_like(pre: tuple[str, str] | None, output: tuple[str, str] | None, placement: str) -> tuple[BranchFacts, ...]:
    pres, outputs = pre or (None, None), output or (None, None)
    return (
        BranchFacts("attention", placement, *SELF, pre=pres[0], output=outputs[0]),
        BranchFacts("mlp", placement, *GATED, pre=pres[1], output=outputs[1]),
    )


def neox(parallel: bool) -> Facts:
    attention = both("attention.query_key_value"), both("attention.dense")
    mlp = both("mlp.dense_h_to_4h"), both("mlp.dense_4h_to_h")
    branches = (
        BranchFacts("attention", "pre", *attention, pre="input_layernorm", parallel=parallel),
        BranchFacts("mlp", "pre", *mlp, pre="post_attention_layernorm", parallel=parallel),
    )
    return Facts(LAYERNORM, (StreamFacts("gpt_neox.layers", branches, final="gpt_neox.final_layer_norm"),))


def opt(before: bool) -> Facts:
    place, norm = ("pre", "pre") if before else ("post", "post")
    attention = both(*QKV), both("self_attn.out_proj")
    branches = (
        BranchFacts("attention", place, *attention, **{norm: "self_attn_layer_norm"}),
        BranchFacts("mlp", place, both("fc1"), both("fc2"), **{norm: "final_layer_norm"}),
    )
    final = "model.decoder.final_layer_norm" if before else None
    stream = StreamFacts("model.decoder.layers", branches, final=final, needed=before)
    return Facts(LAYERNORM, (stream,), tied="model.decoder.embed_tokens.weight")


def encoder(norm_first: bool, final: bool) -> Facts:
    place = "pre" if norm_first else "post"
    packed = "self_attn.in_proj_weight", "self_attn.in_proj_bias"
    branches = (
        BranchFacts("attention", place, packed, both("self_attn.out_proj"), **{place: "norm1"}),
        BranchFacts("mlp", place, both("linear1"), both("linear2"), **{place: "norm2"}),
    )
    stream = StreamFacts("layers", branches, final="norm" if final else None, needed=norm_first)
    return Facts(LAYERNORM, (stream,), head=None)


def t5() -> Facts:
    def attention(index: int, name: str, kind: str, readers: str) -> BranchFacts:
        at = f"layer.{index}.{name}"
        read, write = weights(*(f"{at}.{r}" for r in readers)), weights(f"{at}.o")
        return BranchFacts(kind, "pre", read, write, pre=f"layer.{index}.layer_norm")

    def mlp(index: int) -> BranchFacts:
        at = f"layer.{index}.DenseReluDense"
        return BranchFacts("mlp", "pre", weights(f"{at}.wi"), weights(f"{at}.wo"), pre=f"layer.{index}.layer_norm")

    own, cross = (
        attention(0, "SelfAttention", "attention", "qkv"),
        attention(1, "EncDecAttention", "cross_attention", "q"),
    )
    streams = (
        StreamFacts("encoder.block", (own, mlp(1)), final="encoder.final_layer_norm"),
        StreamFacts("decoder.block", (own, cross, mlp(2)), final="decoder.final_layer_norm"),
    )
    attention_facts = AttentionFacts(scale=1.0)
    return Facts(RMSNORM, streams, attention_facts, sites=3 * LAYERS, tied="shared.weight", logits=WIDTH**-0.5)


def bert() -> Facts:
    self_attention = both("attention.self.query", "attention.self.key", "attention.self.value")
    branches = (
        BranchFacts(
            "attention", "post", self_attention, both("attention.output.dense"), post="attention.output.LayerNorm"
        ),
        BranchFacts("mlp", "post", both("intermediate.dense"), both("output.dense"), post="output.LayerNorm"),
    )
    stream = StreamFacts("bert.encoder.layer", branches, needed=False, entry="bert.embeddings.LayerNorm")
    others = {"bert.embeddings.LayerNorm": "embedding", "cls.predictions.transform.LayerNorm": "head"}
    return Facts(
        BERT_NORM,
        (stream,),
        head="cls.predictions.decoder.weight",
        tied="bert.embeddings.word_embeddings.weight",
        others=others,
    )


def gpt2() -> Facts:
    branches = (
        BranchFacts("attention", "pre", both("attn.c_attn"), both("attn.c_proj"), pre="ln_1"),
        BranchFacts("mlp", "pre", both("mlp.c_fc"), both("mlp.c_proj"), pre="ln_2"),
    )
    return Facts(
        LAYERNORM, (StreamFacts("transformer.h", branches, final="transformer.ln_f"),), tied="transformer.wte.weight"
    )


def gemma2() -> Facts:
    pre = "input_layernorm", "pre_feedforward_layernorm"
    output = "post_attention_layernorm", "post_feedforward_layernorm"
    stream = StreamFacts("model.layers", llama_like(pre, output, "sandwich"), final="model.norm", multiplier=WIDTH**0.5)
    attention = AttentionFacts(kv_heads=2, scale=16**-0.5, softcap=50.0)
    return Facts(GEMMA_NORM, (stream,), attention, tied="model.embed_tokens.weight", softcap=30.0)


def bloom() -> Facts:
    attention = both("self_attention.query_key_value"), both("self_attention.dense")
    branches = (
        BranchFacts("attention", "pre", *attention, pre="input_layernorm"),
        BranchFacts("mlp", "pre", both("mlp.dense_h_to_4h"), both("mlp.dense_4h_to_h"), pre="post_attention_layernorm"),
    )
    entry = "transformer.word_embeddings_layernorm"
    stream = StreamFacts("transformer.h", branches, final="transformer.ln_f", entry=entry)
    return Facts(LAYERNORM, (stream,), tied="transformer.word_embeddings.weight", others={entry: "embedding"})


PRE = "input_layernorm", "post_attention_layernorm"
QK_NORMS = {"self_attn.q_norm": "query", "self_attn.k_norm": "key"}
FACTS: dict[str, Facts] = {
    "gpt2": gpt2(),
    "llama": Facts(
        RMSNORM,
        (StreamFacts("model.layers", llama_like(PRE, None, "pre"), final="model.norm"),),
        AttentionFacts(kv_heads=2),
    ),
    "bert": bert(),
    "t5": t5(),
    "opt_pre": opt(True),
    "opt_post": opt(False),
    "neox_parallel": neox(True),
    "neox_sequential": neox(False),
    "gemma2": gemma2(),
    "qwen3": Facts(
        RMSNORM,
        (StreamFacts("model.layers", llama_like(PRE, None, "pre"), final="model.norm"),),
        AttentionFacts(kv_heads=2, qk_axis="head"),
        below=QK_NORMS,
    ),
    "olmo2": Facts(
        OLMO_NORM,
        (
            StreamFacts(
                "model.layers",
                llama_like(None, ("post_attention_layernorm", "post_feedforward_layernorm"), "output"),
                final="model.norm",
            ),
        ),
        AttentionFacts(kv_heads=2, qk_axis="full"),
        below=QK_NORMS,
    ),
    "bloom": bloom(),
    "encoder_pre": encoder(True, False),
    "encoder_pre_final": encoder(True, True),
    "encoder_post": encoder(False, False),
    "encoder_post_final": encoder(False, True),
}
