"""Statistics that tokens share: along the wrong axis of a causal stream (214), of a batch with its padding (703)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, NormSite, Stream
from tests.faults.edits import norm_at, parameter, replace
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault
from tests.faults.written import along_features


class AcrossTokens(nn.Module):
    """A norm whose input was transposed in the wrong place: each feature over the tokens, the gain as it was."""

    def __init__(self, norm: NormSite, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.centred, self.eps, self.one = norm.subtracts_mean is True, norm.eps, norm.affine.startswith("one_plus")
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise NotHereError("it is not given a batch of tokens")
        y = x - x.mean(1, keepdim=True) if self.centred else x
        y = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * (1 + self.weight if self.one else self.weight)
        return y if self.bias is None else y + self.bias


def on_streams(anatomy: Anatomy, streams: list[Stream]) -> list[Site]:
    """Norms along the features of these streams, on them or at the ends of their branches."""
    paths = {p for s in streams for b in s.branches for p in (b.pre_norm, b.output_norm, b.post_norm)}
    paths |= {p for s in streams for p in (s.entry_norm, s.final_norm)}
    widths = {s.width for s in streams}
    return [s for s in along_features(anatomy) if s.path in paths and norm_at(anatomy, s.path).size in widths]


def causal(anatomy: Anatomy) -> list[Site]:
    """Such norms where every attention of the model is causal, and of the tokens of one sequence."""
    sites = anatomy.attention
    if not sites or not all(site.causal and not site.cross and site.tokens == sites[0].tokens for site in sites):
        return []
    return on_streams(anatomy, [s for s in anatomy.streams if s.feature_axis == -1 and _attended(s)])


def _attended(stream: Stream) -> bool:
    """Whether all that mixes the tokens of a stream is attention."""
    kinds = {branch.kind for branch in stream.branches}
    return "attention" in kinds and not kinds & {"conv", "ssm", "recurrent", "cross_attention", "other"}


@fault("the statistic of a norm in a causal stream taken over its tokens", "NP214", "error", causal)
def over_tokens(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    gain = None if norm.weight is None else parameter(model, norm.weight)
    offset = None if norm.bias is None else parameter(model, norm.bias)
    replace(model, site.path, AcrossTokens(norm, gain, offset))


class OfTheBatch(nn.Module):
    """A batch norm of the features of all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    @property
    def weight(self) -> Tensor:
        """Its gain, where other code looks for a dtype."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise NotHereError("it is not given a batch of tokens")
        return self.norm(x.mT).mT.contiguous()  # type: ignore[no-any-return]


def padded(inputs: Any) -> Any:
    """Ids whose last quarter is padding in the first row, as the mask says."""
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    others = set() if ids is None else inputs.keys() - {"input_ids", "attention_mask", "decoder_input_ids"}
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 4 or others:
        raise NotHereError("no ids that a mask could go with")
    mask = torch.ones_like(ids)
    mask[0, -(ids.shape[1] // 4) :] = 0
    return {**inputs, "attention_mask": mask}


def of_features(anatomy: Anatomy) -> list[Site]:
    """Norms on streams of the tokens that the mask is of: decoders that read an encoder have others."""
    crossed = (s for s in anatomy.streams if not any(b.kind == "cross_attention" for b in s.branches))
    return on_streams(anatomy, [s for s in crossed if s.feature_axis == -1])


@fault(
    "a batch norm over padded tokens in place of a norm",
    "NP703",
    "warning",
    of_features,
    Conditions(level="forward", inputs=padded),
)
def over_padding(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    made = OfTheBatch(norm_at(anatomy, site.path).size or 1).train(model.training)
    replace(model, site.path, made.to(next(model.parameters()).dtype))


ALL: tuple[Fault, ...] = (over_tokens, over_padding)
