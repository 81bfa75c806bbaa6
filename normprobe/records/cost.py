"""What the norms cost: operations, memory traffic, and their share of the time of a forward."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class NormCost(Record):
    """One norm in one forward, over its executions.

    Attributes:
        path: of its module.
        calls: how often it ran.
        operations: how many operations of torch it ran that compute something (views and allocations are left out).
        reductions: how many of these reduce, or are one kernel for a whole norm.
        bytes_moved: bytes of all tensors that these operations read and write, as if none stayed in a cache.
        bytes_needed: bytes that one kernel for all would read and write: input, output, parameters and buffers.
        fused: whether one kernel computes it (as in the Anatomy).
        seconds: time in its module, without that of the norms inside it.
    """

    path: str
    calls: int
    operations: int
    reductions: int
    bytes_moved: int
    bytes_needed: int
    fused: bool
    seconds: float


class CostMeasure(Record):
    """All norms that are modules. Times are those of this machine, and all of one forward: the fastest of the timed
    ones, as what else the machine does only adds.

    Attributes:
        basis: `unit` is seconds; `count` is the number of timed forwards.
        device: where it ran.
        norms: in the order of the Anatomy.
        forward_seconds: of this forward, on the given inputs.
        share: of that time in norms, the sum of their `seconds` over `forward_seconds`; norms inside norms count once.
        one_token_seconds, one_token_share: the same for one token of one sample without a cache, what a step of
            decoding costs beside the reading of its cache; None where the inputs cannot be cut to one token.
    """

    basis: Basis
    device: str
    norms: tuple[NormCost, ...]
    forward_seconds: float
    share: float
    one_token_seconds: float | None
    one_token_share: float | None
