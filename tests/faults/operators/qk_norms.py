"""Norms on queries and keys: on one side alone, or over a wrong axis (2xx)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, AttentionSite, HeadRows
from tests.faults.edits import at, behind, module_at, passing, replace, uncalled
from tests.faults.fault import Fault, NotHereError, Site, fault

Heads = Callable[[Tensor], Tensor]  # a change of queries or keys, [batch, tokens, heads, features]


def normed(anatomy: Anatomy) -> list[Site]:
    """Attention sites with norms on queries and keys that are two modules."""
    found = []
    for site in anatomy.attention:
        pair = site.qk_norm
        if pair is None or pair.query is None or pair.key is None or pair.query == pair.key:
            continue
        norms = [anatomy.norm(pair.query), anatomy.norm(pair.key)]
        alone = all(sum(n.role == role and within(n.path, site.path) for n in anatomy.norms) == 1 for role in _SIDES)
        plain = all(n is not None and n.module and n.executions == 1 for n in norms)
        if plain and alone and {"q", "k"} <= site.columns.keys():
            found.append(Site(site.path, site))
    return found


_SIDES = ("query", "key")


def within(path: str, holder: str) -> bool:
    return holder == "." or path.startswith(f"{holder}.")


def bare(anatomy: Anatomy) -> list[Site]:
    """Sites of self-attention without such norms whose queries and keys come from weights."""
    return [
        Site(site.path, site)
        for site in anatomy.attention
        if site.qk_norm is None and not site.cross and {"q", "k"} <= site.columns.keys() and site.head_dim > 1
        if site.columns["q"] != site.columns["k"]
    ]


def projected(anatomy: Anatomy) -> list[Site]:
    """Such sites that have a weight for queries and one for keys, of which each head has one range of rows."""
    return [site for site in bare(anatomy) if all(_whole(site.detail.columns[side], anatomy) for side in ("q", "k"))]


def _whole(rows: HeadRows, anatomy: Anatomy) -> bool:
    shape = next((weight.shape for weight in anatomy.weights if weight.parameter == rows.parameter), None)
    spans = [span for head in rows.heads for span in head]
    sizes = {stop - start for start, stop in spans}
    one_each = len(spans) == len(rows.heads) and len(sizes) == 1
    return shape is not None and len(shape) == 2 and one_each and len(spans) * max(sizes) == shape[rows.axis]


def change_projections(model: nn.Module, site: AttentionSite, sides: str, change: Heads) -> None:
    """Change what the weights of these sides give, [batch, tokens, heads, features]."""
    for side in sides:
        rows = site.columns[side]  # type: ignore[index]

        def on_output(y: Tensor, count: int = len(rows.heads)) -> Tensor:
            return change(y.unflatten(-1, (count, -1))).flatten(-2)

        behind(module_at(model, rows.parameter.rpartition(".")[0] or "."), on_output)


def operated(anatomy: Anatomy) -> list[Site]:
    """Such sites whose queries and keys are operands of one operation: torch's attention, or their product."""
    return [s for s in bare(anatomy) if s.detail.product is not None or s.detail.site.op == _WHOLE]


_WHOLE = "scaled_dot_product_attention"


def change_operands(model: nn.Module, site: AttentionSite, sides: str, change: Heads) -> None:
    """Change queries and keys right before their product, as [batch, tokens, heads, features]."""

    def on_side(x: Tensor, heads: int, turned: bool) -> Tensor:
        x = x.transpose(-2, -1) if turned else x
        whole = x.unflatten(0, (-1, heads)) if x.dim() == 3 else x
        made = change(whole.transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return made.transpose(-2, -1) if turned else made

    def attend(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands, first = list(args), 0 if site.product is None else len(args) - 2
        if "q" in sides:
            operands[first] = on_side(operands[first], site.heads, False)
        if "k" in sides:
            key = operands[first + 1]
            axis = 0 if key.dim() == 3 else 1
            count = site.kv_heads if key.shape[axis] % site.heads else site.heads
            operands[first + 1] = on_side(key, count, site.product is not None)
        return run(*operands, **kwargs)

    at(model, site.site if site.product is None else site.product.site, attend)


def unit(x: Tensor, axis: int) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-6)


# ---- one side alone


@fault("the norm on keys replaced by the identity", "NP209", "warning", normed)
def raw_keys(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    passing(model, site.detail.qk_norm.key)


@fault("the norm on queries built and not called", "NP209", "warning", normed, also=("NP208",))
def raw_queries(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    uncalled(model, site.detail.qk_norm.query)


@fault("queries normed behind their projection, keys not", "NP209", "warning", projected)
def queries_alone(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_projections(model, site.detail, "q", lambda x: unit(x, -1))


@fault("keys normed before the product, queries not", "NP209", "warning", operated)
def keys_alone(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_operands(model, site.detail, "k", lambda x: unit(x, -1))


# ---- a wrong axis


@fault("queries and keys normed over tokens behind their projections", "NP210", "error", projected)
def over_tokens(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_projections(model, site.detail, "qk", lambda x: unit(x, 1))


@fault("queries and keys normed over tokens before their product", "NP210", "error", operated)
def over_tokens_late(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_operands(model, site.detail, "qk", lambda x: unit(x, 1))


@fault(
    "queries and keys normed across heads",
    "NP210",
    "error",
    lambda anatomy: [s for s in projected(anatomy) if min(s.detail.heads, s.detail.kv_heads) > 1],
)
def across_heads(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    change_projections(model, site.detail, "qk", lambda x: unit(x, 2))


class OverTokens(nn.Module):
    """A norm over the axis before the last two, or the last but one: tokens of [B, T, H, F] and of [B, H, T, F]."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axes = [axis for axis in range(1, x.dim() - 1) if x.shape[axis] == self.tokens]
        if not axes:
            raise NotHereError("no axis of tokens")
        return unit(x, axes[0])


@fault("norms on queries and keys over tokens in place of features", "NP210", "error", normed)
def moved_axis(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    known = site.detail
    if known.tokens is None or known.tokens[0] in (known.heads, known.kv_heads):
        raise NotHereError("tokens cannot be told from heads")
    replace(model, known.qk_norm.query, OverTokens(known.tokens[0]))
    replace(model, known.qk_norm.key, OverTokens(known.tokens[1]))


ALL: tuple[Fault, ...] = (
    raw_keys,
    raw_queries,
    queries_alone,
    keys_alone,
    over_tokens,
    over_tokens_late,
    across_heads,
    moved_axis,
)
