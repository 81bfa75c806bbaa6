"""What the configurations inside a model say about norms, attention and readout, by the names of their fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from normprobe.inputs.fields import text_part
from normprobe.records import Declared
from normprobe.records.declared import Fact

_Read = Callable[[Any], bool | float | None]


def declared_by(model: nn.Module) -> tuple[Declared, ...]:
    """Every fact that a configuration held by a module of `model` states, outermost modules first.

    A configuration counts for the outermost module that holds it. Facts about the head that lie in its part for text
    count for the module that holds the whole.
    """
    found: list[Declared] = []
    holders: dict[str, int] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or not _fields(config) or _around(path, holders) == id(config):
            continue
        holders[path] = id(config)
        found += _stated(path or ".", config)
    return tuple(found)


def _around(path: str, holders: Mapping[str, int]) -> int | None:
    """The configuration of the nearest module around `path`."""
    while path:
        path = path.rpartition(".")[0]
        if path in holders:
            return holders[path]
    return None


def _stated(path: str, config: Any) -> Iterator[Declared]:
    own = {d.field: d for d in _of(path, config, "")}
    yield from own.values()
    text = text_part(config) if hasattr(config, "__dict__") else config
    told = {d.fact for d in own.values()}
    if text is not config:
        name = next((n for n, v in _fields(config).items() if v is text), "text")
        yield from (d for d in _of(path, text, f"{name}.") if d.fact in _HEAD and d.fact not in told)


def _of(path: str, config: Any, prefix: str) -> Iterator[Declared]:
    fields = _fields(config)
    for name, (fact, read) in NAMES.items():
        value = read(fields[name]) if name in fields else None
        if value is not None and not (fact == "window" and not _slides(fields)):
            yield Declared(path=path, field=prefix + name, fact=fact, stated=fields[name], value=value)


def _fields(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration: a mapping, or an object with attributes."""
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _slides(fields: Mapping[str, Any]) -> bool:
    """Whether the other fields leave the sliding window in force, in some layer at least."""
    kinds = fields.get("layer_types")
    if fields.get("use_sliding_window") is False:
        return False
    return kinds is None or any("sliding" in str(kind) for kind in kinds)


def _number(value: Any) -> float | None:
    """`value` where it is a finite number above zero; others mean in a configuration that there is none."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) and value > 0 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _true(value: Any) -> bool | None:
    """A field of which only `True` states something."""
    return True if value is True else None


def _opposite(value: Any) -> bool | None:
    return not value if isinstance(value, bool) else None


def _inverse(value: Any) -> float | None:
    known = _number(value)
    return None if known is None else 1.0 / known


def _inverse_root(value: Any) -> float | None:
    known = _number(value)
    return None if known is None else known**-0.5


# The vocabulary of transformers: fields that state one thing wherever they occur.
NAMES: dict[str, tuple[Fact, _Read]] = {
    "rms_norm_eps": ("eps", _number),
    "layer_norm_eps": ("eps", _number),
    "layer_norm_epsilon": ("eps", _number),
    "layernorm_epsilon": ("eps", _number),
    "layernorm_eps": ("eps", _number),
    "norm_eps": ("eps", _number),
    "norm_epsilon": ("eps", _number),
    "use_qk_norm": ("qk_norm", _flag),
    "qk_norm": ("qk_norm", _flag),
    "qk_layernorm": ("qk_norm", _flag),
    "attn_logit_softcapping": ("attention_softcap", _number),
    "attention_multiplier": ("attention_scale", _number),
    "query_pre_attn_scalar": ("attention_scale", _inverse_root),
    "sliding_window": ("window", _number),
    "embedding_multiplier": ("input_multiplier", _number),
    "residual_multiplier": ("branch_multiplier", _number),
    "use_parallel_residual": ("parallel", _flag),
    "parallel_attn": ("parallel", _true),
    "do_layer_norm_before": ("pre_norm", _flag),
    "do_stable_layer_norm": ("pre_norm", _flag),
    "apply_residual_connection_post_layernorm": ("pre_norm", _opposite),
    "logit_scale": ("logit_multiplier", _number),
    "logits_scaling": ("logit_multiplier", _inverse),
    "lm_head_multiplier": ("logit_multiplier", _number),
    "final_logit_softcapping": ("logit_softcap", _number),
    "logits_soft_cap": ("logit_softcap", _number),
    "output_logit_soft_cap": ("logit_softcap", _number),
    "tie_word_embeddings": ("tied", _flag),
}
_HEAD: frozenset[Fact] = frozenset({"logit_multiplier", "logit_softcap", "tied"})
