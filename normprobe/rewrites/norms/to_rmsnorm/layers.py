"""What is laid over the class of the module that a stream enters."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from normprobe.rewrites.at_boundary import AtInput, AtOutput


def centred(x: Tensor) -> Tensor:
    """x minus its mean over the features, the mean taken in float32 or wider: (…, d) -> (…, d), dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


@final
class CentredInput(AtInput):
    """Takes the mean over the features from the stream that enters."""

    NOTE = "takes the mean from the stream (normprobe)"
    KEY = "_centred_argument"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The stream, centred."""
        return centred(stream)


@final
class CentredOutput(AtOutput):
    """Takes the mean over the features from the stream that leaves."""

    NOTE = "takes the mean from the stream (normprobe)"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The stream, centred."""
        return centred(stream)
