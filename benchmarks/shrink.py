"""A small configuration of any architecture, by the meaning of its fields and by no table of architectures.

Layers are chosen so that each combination of per-layer settings (attention type, dense or sparse, …) stays once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

LAYERS, MOST_LAYERS = 3, 4
HIDDEN, INTERMEDIATE, VOCABULARY, EXPERTS = 64, 96, 128, 4
IMAGE, STAGED_IMAGE = 32, 64  # pixels a side; pyramids halve theirs several times

# What may be shrunk, most first; each later set leaves more of the default configuration alone.
# "unset" fills fields that the default leaves empty, "twice" keeps two layers of each kind, "one head" is for widths
# that no other number divides, "derived" sets fields too that the constructor would compute.
ALL = ("depth", "width", "ffn", "filters", "vocab", "experts", "positions", "image")
LEVELS: tuple[tuple[str, ...], ...] = (
    ALL,
    (*ALL, "unset"),
    (*ALL, "twice"),
    (*ALL, "one head"),
    (*ALL, "derived"),
    tuple(group for group in ALL if group != "vocab"),
    ("depth", "width", "ffn", "vocab", "experts", "positions"),
    ("depth", "ffn", "vocab", "experts", "image"),
    ("depth", "vocab", "experts"),
    ("depth", "experts"),
    ("vocab",),
    (),
)

DEPTH = re.compile(
    r"^(n_layers?|depth|num_blocks|num_hidden_layers|num_layers|layers"
    r"|(num_)?(\w+_)?(encoder|decoder|attention|prediction|text|vision|audio)_(num_)?(hidden_)?layers|num_layers_per_stack"
    r"|num_self_attends_per_block)$"
)
NOT_DEPTH = re.compile(r"sparse|prenet|postnet|conv|adapter|predict")
# (group, pattern, value): the first pattern that matches decides.
RULES: tuple[tuple[str, re.Pattern[str], int], ...] = tuple(
    (group, re.compile(pattern), value)
    for group, pattern, value in (
        ("unset", r"^(n_shared_experts|pad_token_id|indexer_kv_heads)$", 1),
        ("unset", r"^mask_token_id$", 2),
        ("unset", r"budget$", 8),
        ("unset", r"compress_ratio$", 2),
        ("vocab", r"^(?!type_|pronunciation|shape).*(vocab_size|hash_byte_group_vocab)", VOCABULARY),
        ("positions", r"^(max_position_embeddings|n_positions|n_ctx)$", 512),
        ("positions", r"^sliding_window$", 8),
        ("experts", r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$", EXPERTS),
        ("experts", r"^(zero_expert_num)$", 2),
        ("experts", r"(experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|experts_top_k)$", 2),
        ("experts", r"^(n_group|num_expert_group|n_groups_router)$", 2),
        ("experts", r"^(topk_group|topk_method_group)$", 1),
        ("width", r"^(linear_num_key_heads|.*(key_value|kv)_heads|n_head_kv|num_kv)$", 2),
        ("width", r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", 8),
        ("width", r"rope_head_dim$", 8),
        ("width", r"^qk_head_dim$", 24),
        ("width", r"(head_dim|headdim|d_head|dim_head|d_kv|attention_head_size|query_pre_attn_scalar)$", 16),
        ("width", r"^(\w*_)?(n_|num_)?(attention_|q_|query_)?heads?$", 4),
        ("width", r"(kv_lora_rank)$", 32),
        ("width", r"(lora_rank)$", 24),
        ("width", r"^mamba_d_ssm$", 2 * HIDDEN),
        ("width", r"^(rotary_dim)$", 8),
        ("width", r"^(chunk_size|mamba_chunk_size)$", 16),
        ("width", r"^(mamba_n_groups|mamba_ngroups|n_groups)$", 2),
        (
            "ffn",
            r"(intermediate_size\w*|ffn_dim|d_ff|n_inner|ffn_hidden_size|feed_forward_size|inner_dim)$",
            INTERMEDIATE,
        ),
        (
            "width",
            r"^(hidden_size|d_model|n_embd|n_embed|dim|d_embed|embed_dim|emb_dim|embedding_size|hidden_dim|lru_width"
            r"|\w*_hidden_size|\w*_embedding_size|\w*embed_dim|hidden_size_\w+|\w*proj_dim|projection_dim"
            r"|output_dim|projector_input_dim|projector_output_dim|d_latents|attention_key_size)$",
            HIDDEN,
        ),
        ("filters", r"num_filters$", 4),
        ("image", r"^image_size$", IMAGE),
        (
            "depth",
            r"^(num_kv_shared_layers|num_dense_layers|first_k_dense_replace|num_global_layers|max_window_layers)$",
            1,
        ),
        ("depth", r"^num_sparse_\w+_layers$", 1),
        ("depth", r"^(\w+_layer_period|\w*_interval|_?sliding_window_pattern|\w*_sparse_step)$", 2),
        ("depth", r"^\w+_layer_offset$", 1),
        ("depth", r"^n_layers_per_attn_res_block$", 1),
        ("depth", r"^loop_layer_index_start$", 1),
        ("depth", r"^loop_layer_index_end$", 2),
    )
)


def shrunken(config: Any, groups: Sequence[str]) -> Any:
    """A new configuration of the same class with the fields of `groups` made small, in its parts too."""
    given = overrides(config, groups)
    given |= {name: shrunken(part, groups) for name, part in parts(config).items() if name in fields(config)}
    return type(config)(**given)


def parts(config: Any) -> dict[str, Any]:
    """The configurations inside a configuration, by the name of their field."""
    return {name: value for name, value in vars(config).items() if hasattr(type(value), "model_type")}


def fields(config: Any) -> frozenset[str]:
    """The names that the configuration's class takes."""
    if dataclasses.is_dataclass(config):
        return frozenset(field.name for field in dataclasses.fields(config))
    return frozenset(vars(config))


def overrides(config: Any, groups: Sequence[str]) -> dict[str, Any]:
    """The values of the configuration's own fields under `groups`."""
    known = {name: value for name, value in vars(config).items() if name in fields(config)}
    staged = any(
        re.search(r"depths?$|heads$|num_block_repeats$", name) and _is_list(value) for name, value in known.items()
    )
    allowed = [group for group in groups if group != "width" or not staged]
    derived = frozenset() if "derived" in groups else _derived(config)
    small = {
        name: v
        for name, value in known.items()
        if name not in derived and (v := _scalar(name, value, allowed)) is not None
    }
    if staged and "image_size" in small:
        small["image_size"] = STAGED_IMAGE
    if "width" in allowed:
        small |= _rope(known) | _same_heads(known, small) | _inner_heads(known, small)
    if "one head" in allowed:
        small |= {name: 1 for name, value in known.items() if name.endswith("heads") and isinstance(value, int)}
    if "depth" in groups:
        small |= _layers(known, "twice" in groups)
    if "vocab" in groups:
        small |= _token_ids(known)
    if "unset" in groups:
        small |= _unset(config, known, {**known, **small}, allowed)
    return small


def _derived(config: Any) -> frozenset[str]:
    """Fields without a default of their own: the constructor computes them from others, and will again."""
    if not dataclasses.is_dataclass(config):
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(config) if field.default is None)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _scalar(name: str, value: Any, groups: Sequence[str]) -> int | float | None:
    """The small value of a number, None where it stays."""
    if isinstance(value, float) and re.search(r"^depth_coefficient$", name) and "depth" in groups:
        return min(value, 1.0)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return None
    found = _rule(name, [group for group in groups if group != "unset"])
    return None if found is None else min(found, value)


def _rule(name: str, groups: Sequence[str]) -> int | None:
    """The value of the first rule for a name; rules for unset fields count only where those are filled."""
    for group, pattern, small in RULES:
        if pattern.search(name) and (group in groups or group != "unset"):
            return small if group in groups else None
    return None


def _unset(config: Any, known: dict[str, Any], now: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """Values for fields that the default leaves empty though the model needs them."""
    found: dict[str, Any] = {}
    kinds = {f.name: str(f.type) for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else {}
    for name in (name for name, value in known.items() if value is None and "int" in kinds.get(name, "")):
        value = _rule(name, [group for group in groups if group != "positions"])
        if value is not None:
            found[name] = value
    types = now.get("layer_types", ())
    if types is None or (types and set(types) == {"linear_attention"}):
        found["layer_types"] = [*(types or ["full_attention"] * now["num_hidden_layers"])[:-1], "full_attention"]
    if not now.get("rope_parameters", True):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        found["rope_parameters"] = {name: rope for name in dict.fromkeys(types or ())} or rope
    if now.get("languages") and now.get("default_language", "") is None:
        found["default_language"] = now["languages"][0]
    return found


def _same_heads(known: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Key heads as many as query heads, the head as wide as its rotary part, where the default has it so."""
    found = {}
    heads = known.get("num_attention_heads")
    if heads is not None and heads == known.get("num_key_value_heads") and "num_attention_heads" in small:
        found["num_key_value_heads"] = small["num_attention_heads"]
    rotary = known.get("qk_rope_head_dim")
    if rotary is not None and rotary == known.get("head_dim") and "qk_rope_head_dim" in small:
        found["head_dim"] = small["qk_rope_head_dim"]
    return found


def _inner_heads(known: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Heads of a state-space layer, whose inner width is `expand` times the hidden size."""
    if {"expand", "num_heads", "head_dim", "hidden_size"} <= set(known):
        return {"num_heads": int(known["expand"] * small["hidden_size"]) // small["head_dim"], "n_groups": 2}
    if {"mamba_expand", "mamba_n_heads", "mamba_d_head", "hidden_size"} <= set(known):
        inner = small.get("mamba_d_ssm") or int(known["mamba_expand"] * small["hidden_size"])
        return {"mamba_d_head": inner // small["mamba_n_heads"]}
    return {}


def _rope(known: dict[str, Any]) -> dict[str, Any]:
    """Sections of a multi-axis rotary embedding, cut to half of the small head."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = known.get(name)
        if isinstance(value, dict) and value.get("mrope_section"):
            found[name] = {**value, "mrope_section": [2, 3, 3]}
    return found


def _layers(known: dict[str, Any], twice: bool) -> dict[str, Any]:
    """Fewer layers: their count, the lists with one value a layer, and the lists of layer numbers."""
    counts = {n: v for n, v in known.items() if isinstance(v, int) and DEPTH.match(n) and not NOT_DEPTH.search(n)}
    total = max(counts.values(), default=0)
    lists = {n: list(v) for n, v in known.items() if _is_list(v) and len(v) == total and not _numbers_layers(n, v)}
    kept = kept_layers(list(zip(*lists.values(), strict=True)) or [()] * total, twice)
    patterns = known.get("attention_types")
    if _is_list(patterns) and patterns and all(_is_list(p) and len(p) == 2 and _is_list(p[0]) for p in patterns):
        kept = list(range(sum(len(names) for names, _ in patterns)))
        lists = {"attention_types": [[list(names), 1] for names, _ in patterns]} | {
            name: [*values[: len(kept)]] for name, values in lists.items()
        }
        found: dict[str, Any] = {name: len(kept) for name in counts} | lists
        return found
    found = {name: min(value, len(kept)) for name, value in counts.items()}
    found |= {name: [values[i] for i in kept] for name, values in lists.items()}
    for name, value in known.items():
        if _is_list(value) and value and _numbers_layers(name, value) and max(value) < total:
            found[name] = [kept.index(i) for i in value if i in kept]
        elif re.search(r"^(depths|num_layers|layers|layer_depths|num_block_repeats|block_sizes)$", name) and _is_list(
            value
        ):
            found[name] = [min(depth, 2) if isinstance(depth, int) else depth for depth in value]
    return found


def kept_layers(settings: Sequence[Any], twice: bool = False) -> list[int]:
    """Numbers of the layers to keep: the first (two) of each combination of settings, then the first ones."""
    of_kind: dict[str, list[int]] = {}
    for i, setting in enumerate(settings):
        of_kind.setdefault(repr(setting), []).append(i)
    each = 2 if twice else 1
    chosen = sorted(i for numbers in of_kind.values() for i in numbers[:each])[: each * MOST_LAYERS]
    others = [i for i in range(len(settings)) if i not in chosen]
    return sorted([*chosen, *others[: max(0, LAYERS - len(chosen))]])


def _numbers_layers(name: str, value: Sequence[Any]) -> bool:
    """Whether a list holds layer numbers: whole numbers that grow, under a name that says so."""
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    grows = numbers and all(a < b for a, b in pairwise(value))
    return grows and re.search(r"(idxs|ids|indices|indexes|layers)$", name) is not None


def _token_ids(known: dict[str, Any]) -> dict[str, Any]:
    """Special ids inside the small vocabulary, all different."""
    found: dict[str, Any] = {}
    free = iter(range(VOCABULARY - 1, 0, -1))
    for name, value in known.items():
        if not re.search(r"token_(id|ids|index)$", name):
            continue
        if isinstance(value, int) and value >= VOCABULARY:
            found[name] = next(free)
        elif _is_list(value) and value and all(isinstance(v, int) for v in value) and max(value) >= VOCABULARY:
            found[name] = [next(free)]
    return found
