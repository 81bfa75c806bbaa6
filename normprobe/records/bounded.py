"""Bounded stand-ins for norms at work: how far their inputs reach into the bend."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class BoundedNorm(Record):
    """One norm of kind `dyt`, of outputs z without gain and offset: between -1 and 1, as tanh(alpha · x) is.

    Attributes:
        path: as in the Anatomy.
        limit: how far what it makes, without gain and offset, goes to either side: z is in units of it.
        basis: of the sampled elements of what it was given, over all executions, without padding.
        input_rms: of these elements; of a norm that is no module what its non-linearity is given, alpha · x.
        output_rms: of their z: near 1 where most are at a limit, near 0 where tanh(alpha · x) is alpha · x.
        saturated: share of them with |z| above 0.99.
    """

    path: str
    limit: float = 1.0
    basis: Basis
    input_rms: float
    output_rms: float
    saturated: float
