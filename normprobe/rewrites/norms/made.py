"""A norm to add to a stream: of the stream's own kind, width and eps, with unit gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from normprobe.records import Anatomy, NormSite, Stream
from normprobe.records.parts import whole
from normprobe.rewrites.base import Survey

KINDS = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class Made:
    """A norm that is to be made; `like` names a parameter whose dtype and device the new ones take."""

    kind: str
    width: int
    eps: float
    affine: str
    like: str | None

    def __str__(self) -> str:
        return f"{self.kind}({self.width}, eps={self.eps:.4g})"


def wanted(survey: Survey, stream: Stream, kind: str, eps: float | None) -> Made | str:
    """The norm to add to a stream, or why none can be made.

    Args:
        survey: of the model.
        stream: the stream.
        kind: "same" as that of the stream's own norms, "layernorm" or "rmsnorm".
        eps: inside the root; None for that of the stream's own norm.
    """
    norm = _own_norm(survey.anatomy, stream)
    why = _unfit(stream, norm)
    if why is not None or norm is None or stream.width is None:
        return why or "no norm of its own to go by"
    kind = norm.kind if kind == "same" else kind
    if eps is None and norm.eps_placement == "inside_sqrt":
        eps = norm.eps
    if kind not in KINDS:
        return f"its own norms are of kind {kind}; say kind='layernorm' or 'rmsnorm'"
    if eps is None:
        return f"its own norm {norm.path} has eps {norm.eps_placement}, not inside the root; pass eps="
    return Made(kind, stream.width, eps, norm.affine, _like(survey, norm))


def _own_norm(anatomy: Anatomy, stream: Stream) -> NormSite | None:
    """The norm that the stream's last branch begins with, or ends in where no branch begins with one."""
    branches = stream.branches[::-1]
    paths = [*(b.pre_norm for b in branches), *(b.output_norm for b in branches), *(b.post_norm for b in branches)]
    return next((norm for path in paths if path is not None and (norm := anatomy.norm(path))), None)


def _unfit(stream: Stream, norm: NormSite | None) -> str | None:
    if norm is None:
        return "none of its branches begins or ends with a norm, so its kind and eps are not known"
    if stream.feature_axis is None:
        return "the axis of its features could not be told"
    if stream.branches[-1].feature_axis != -1:
        return "its features are channels before space; only streams with the features last are handled"
    if norm.size is None:
        return f"its own norm {norm.path} is a {norm.kind}, which has no statistic to go by: add norms before"
    if norm.axes != (-1,) or norm.size != stream.width:
        return f"its own norm {norm.path} acts on {norm.size} elements of axes {norm.axes}, not on its {stream.width}"
    return None


def _like(survey: Survey, norm: NormSite) -> str | None:
    if norm.weight is not None:
        return whole(norm.weight, {name for name, _ in survey.model.named_parameters()})
    return next((name for name, p in survey.model.named_parameters() if p.is_floating_point()), None)


def build(model: nn.Module | None, made: Made) -> nn.Module:
    """The norm with unit gain, with the dtype and device of the parameter that it goes by; on meta without a model."""
    place: dict[str, Any] = {"device": "meta"}
    if model is not None:
        like = None if made.like is None else model.get_parameter(made.like)
        place = {} if like is None else {"dtype": like.dtype, "device": like.device}
    place["elementwise_affine"] = made.affine != "none"
    if made.kind == "rmsnorm":
        return nn.RMSNorm(made.width, eps=made.eps, **place)
    return nn.LayerNorm(made.width, eps=made.eps, bias=made.affine.endswith("bias"), **place)
