"""What is laid over the class of a LayerNorm, and over the module that a stream enters."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from normprobe.rewrites.at_boundary import AtInput, AtOutput
from normprobe.rewrites.swap import Layer


@final
class WithoutMean(Layer):
    """The RMSNorm with gain, offset and eps of the LayerNorm below, whose parameters it uses.

    x: (…, d) -> (…, d) in the input's dtype. The mean square is taken in float32, or in the input's dtype where that is
    wider; gain and offset are applied there too, before the cast.
    """

    note = "without the mean: RMSNorm (normprobe)"
    KEY: ClassVar[str] = "_rmsnorm"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x / √(mean(x²) + eps) · gain + offset."""
        eps, weight, bias, one = self.__dict__[self.KEY]
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            gain = self.get_parameter(weight).to(wide)
            y = y * (1 + gain if one else gain)
        if bias is not None:
            y = y + self.get_parameter(bias).to(wide)
        return y.to(x.dtype)


def centred(x: Tensor) -> Tensor:
    """x minus its mean over the features, the mean taken in float32 or wider: (…, d) -> (…, d), dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


@final
class CentredInput(AtInput):
    """Takes the mean over the features from the stream that enters."""

    note = "takes the mean from the stream (normprobe)"
    key = "_centred_argument"

    def act(self, stream: Tensor) -> Tensor:
        """The stream, centred."""
        return centred(stream)


@final
class CentredOutput(AtOutput):
    """Takes the mean over the features from the stream that leaves."""

    note = "takes the mean from the stream (normprobe)"

    def act(self, stream: Tensor) -> Tensor:
        """The stream, centred."""
        return centred(stream)
