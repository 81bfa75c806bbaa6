"""All rewrites by name, and back from plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from normprobe.errors import RewriteError
from normprobe.rewrites.base import Rewrite
from normprobe.rewrites.batchnorm import FoldBatchNorm, FreezeBatchNorm, ToGroupNorm, ToSyncBatchNorm
from normprobe.rewrites.initialise import Initialise
from normprobe.rewrites.mup import MuP
from normprobe.rewrites.norms.add_final import AddFinalNorm
from normprobe.rewrites.norms.add_output import AddOutputNorms
from normprobe.rewrites.norms.eps import SetEps
from normprobe.rewrites.norms.fold import FoldGains
from normprobe.rewrites.norms.fuse import FuseNorms
from normprobe.rewrites.norms.gain_form import StoreGains
from normprobe.rewrites.norms.remove import RemoveNorms
from normprobe.rewrites.norms.to_dyt import ToDyT
from normprobe.rewrites.norms.to_rmsnorm import ToRMSNorm
from normprobe.rewrites.norms.upcast import UpcastNorms
from normprobe.rewrites.qk import AddQKNorm, QKClip
from normprobe.rewrites.reparametrise import PlainWeights, Reparametrise
from normprobe.rewrites.residual import Fixup, ScaleResidual, ToPostNorm

ALL: tuple[type[Rewrite], ...] = (
    UpcastNorms,
    SetEps,
    FuseNorms,
    StoreGains,
    FoldGains,
    AddFinalNorm,
    AddOutputNorms,
    RemoveNorms,
    ToDyT,
    ToRMSNorm,
    ToPostNorm,
    ScaleResidual,
    Fixup,
    AddQKNorm,
    QKClip,
    Initialise,
    MuP,
    Reparametrise,
    PlainWeights,
    FreezeBatchNorm,
    ToSyncBatchNorm,
    ToGroupNorm,
    FoldBatchNorm,
)


def find(name: str) -> type[Rewrite] | None:
    """The rewrite that findings call `name`; None where there is none."""
    return next((each for each in ALL if each.name == name), None)


def load(values: Any) -> Rewrite:
    """The rewrite that `Rewrite.to_dict` gave.

    Raises:
        RewriteError: an unknown rewrite, or values that it does not have.
    """
    if not isinstance(values, Mapping):
        expected, found = "what Rewrite.to_dict gave: {'rewrite': …, …}", f"{type(values).__name__}: {values!r:.60}"
        raise RewriteError("no rewrite can be loaded", expected=expected, found=found)
    kind = find(str(values.get("rewrite")))
    if kind is None:
        names = " | ".join(each.name for each in ALL)
        raise RewriteError("unknown rewrite", expected=names, found=repr(values.get("rewrite")))
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in values.items() if name != "rewrite"}
    if not given.keys() <= known:
        raise RewriteError(f"unknown setting of {kind.name}", expected=", ".join(sorted(known)), found=", ".join(given))
    return kind(**given)
