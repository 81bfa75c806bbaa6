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
