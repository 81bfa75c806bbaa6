"""Whether attention is causal and how far it looks, from the places that its mask hides.

Dims: N samples (all leading axes together), Q queries, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normprobe.anatomy.attention.masks import Hidden

_LARGEST = 1 << 24  # places; larger masks are not looked through

Reach = tuple[bool | None, int | None]


def reach(hidden: Hidden, queries: int, keys: int) -> Reach:
    """(causal, window): None where the mask does not tell.

    Causal: no query sees a later key. The window is how many keys a causal query sees at most, its own included, and
    how far another one sees to each side; None where every query sees as far as the input goes.
    """
    if hidden.more and hidden.places is None:
        return None, None
    if hidden.places is None or not bool(hidden.places.any()):
        return (None if queries * keys == 1 else False), None
    seen = _seen(hidden.places, queries, keys)
    if seen is None:
        return None, None
    if bool((seen == seen[:, :1]).all()):  # the same keys for every query: padding alone
        return (None if hidden.more or _one_key(seen) else False), None
    if queries != keys:
        return None, None
    causal = _causal(seen)
    if hidden.more:
        return causal or None, None
    return causal, _window(seen, causal)


def _seen(places: Tensor, queries: int, keys: int) -> Tensor | None:
    """[N, Q, K], true where a query sees a key; None where the places have another shape."""
    if places.dim() > 1 and places.shape[-1] == keys + 1:
        places = places[..., :keys]  # a sink beside the keys
    while places.dim() < 3:
        places = places[None]
    if places.numel() > _LARGEST or places.shape[-1] not in (1, keys) or places.shape[-2] not in (1, queries):
        return None
    return ~places.expand(*places.shape[:-2], queries, keys).reshape(-1, queries, keys)


def _one_key(seen: Tensor) -> bool:
    return seen.shape[2] == 1 or bool((seen.sum(-1) <= 1).all())


def _causal(seen: Tensor) -> bool | None:
    """None where no two keys of one sample are ever seen: nothing could show it."""
    if bool(seen.triu(1).any()):
        return False
    return True if bool((seen.sum(-1) > 1).any()) else None


def _window(seen: Tensor, causal: bool | None) -> int | None:
    """The width of a band that the places seen are exactly, in all samples; padded keys and queries apart."""
    if causal is None:
        return None
    keys, queries = seen.any(1), seen.any(2)
    place = torch.arange(seen.shape[1], device=seen.device)
    apart = place[:, None] - place
    widest = int(apart.abs()[None].expand_as(seen)[seen].max())
    within = (apart <= widest) & (apart >= (0 if causal else -widest))
    alive = keys[:, None] & queries[:, :, None]
    if not bool((seen == (within & alive)).all()) or not bool((alive & (apart > widest)).any()):
        return None
    return widest + 1 if causal else widest
