"""Where values that are not finite come from."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.sites import OpSite


class NonFinite(Record):
    """The operation that first gave a value that is not finite though it was given finite ones.

    Attributes:
        direction: whether the value itself or a gradient was not finite.
        operation: by torch's name; backward that of autograd's node.
        site: where it runs; None where it is no operation of the model (one of the loss) or was not seen.
    """

    direction: Literal["forward", "backward"]
    operation: str
    site: OpSite | None


class BrokenTensor(Record):
    """A parameter or buffer that is not finite.

    Attributes:
        name: as `named_parameters` and `named_buffers` give it.
        nan, infinite: how many of its `count` elements are NaN, and ∞ or −∞ (in a buffer ∞ alone: −∞ is a mask).
    """

    name: str
    nan: int
    infinite: int
    count: int
