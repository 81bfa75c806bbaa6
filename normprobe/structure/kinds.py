"""Every class that a rewrite puts into a model, by the name that changes are written down with."""

from __future__ import annotations

from typing import Any

from torch import nn

from normprobe.rewrites.at_add import Adding, Link, Linked
from normprobe.rewrites.batchnorm.freeze import Frozen
from normprobe.rewrites.batchnorm.to_group import Grouped
from normprobe.rewrites.mup.layers import Base, DividedInput, ScaledQueries
from normprobe.rewrites.norms.add_final import NormedInput, NormedOutput
from normprobe.rewrites.norms.add_output import NormedWrite
from normprobe.rewrites.norms.computed import Computed, Form, Uncentred
from normprobe.rewrites.norms.to_dyt import DynamicTanh
from normprobe.rewrites.norms.to_rmsnorm.layers import CentredInput, CentredOutput
from normprobe.rewrites.norms.upcast import Upcast
from normprobe.rewrites.qk.modules import HeadNorm, NormedHeads
from normprobe.rewrites.reparametrise.forms import NormedRows, StandardisedRows
from normprobe.rewrites.residual.fixup import Offset
from normprobe.rewrites.residual.scale import ScaledOutput
from normprobe.rewrites.stand_in import Passed

LAYERS: tuple[type[Any], ...] = (
    Adding,
    CentredInput,
    CentredOutput,
    Computed,
    DividedInput,
    DynamicTanh,
    Frozen,
    Grouped,
    Linked,
    NormedHeads,
    NormedInput,
    NormedOutput,
    NormedWrite,
    Offset,
    ScaledOutput,
    ScaledQueries,
    Uncentred,
    Upcast,
)
MODULES: tuple[type[Any], ...] = (HeadNorm, NormedRows, Passed, StandardisedRows)
VALUES: tuple[type[Any], ...] = (Base, Form, Link)
OWN = (*LAYERS, *MODULES, *VALUES)
TORCH: tuple[type[Any], ...] = (nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.SyncBatchNorm)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*OWN, *TORCH)}
