"""normprobe: how a network's signal keeps or loses its scale, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normprobe.version import __version__

if TYPE_CHECKING:
    from normprobe.checks.configuration import load_settings
    from normprobe.diffing.run import diff
    from normprobe.mending import Mending, mend, plan, rewrite
    from normprobe.optimising import AdaptiveClipping, decay_groups, parameter_groups
    from normprobe.patching.load import apply_manifest, load
    from normprobe.probing import probe
    from normprobe.records.settings import Settings
    from normprobe.report.diffs.report import DiffReport
    from normprobe.report.report import Report
    from normprobe.rewrites import (
        AddFinalNorm,
        Effect,
        Fixup,
        FoldBatchNorm,
        FoldGains,
        FreezeBatchNorm,
        FuseNorms,
        Initialise,
        MuP,
        PlainWeights,
        Plan,
        Proof,
        QKClip,
        RemoveNorms,
        Reparametrise,
        Rewrite,
        ScaleResidual,
        SetEps,
        StoreGains,
        ToDyT,
        ToGroupNorm,
        ToPostNorm,
        ToRMSNorm,
        ToSyncBatchNorm,
        UpcastNorms,
    )
    from normprobe.sweeping.check import coordinate_check

__all__ = [
    "AdaptiveClipping",
    "AddFinalNorm",
    "AddOutputNorms",
    "AddQKNorm",
    "DiffReport",
    "Effect",
    "Fixup",
    "FoldBatchNorm",
    "FoldGains",
    "FreezeBatchNorm",
    "FuseNorms",
    "Initialise",
    "Mending",
    "MuP",
    "PlainWeights",
    "Plan",
    "Proof",
    "QKClip",
    "Reparametrise",
    "RemoveNorms",
    "Report",
    "Rewrite",
    "ScaleResidual",
    "SetEps",
    "Settings",
    "StoreGains",
    "ToDyT",
    "ToGroupNorm",
    "ToPostNorm",
    "ToRMSNorm",
    "ToSyncBatchNorm",
    "UpcastNorms",
    "__version__",
    "apply_manifest",
    "coordinate_check",
    "decay_groups",
    "diff",
    "load",
    "load_settings",
    "mend",
    "parameter_groups",
    "plan",
    "probe",
    "rewrite",
]

_HOMES = {
    **dict.fromkeys(("Mending", "mend", "plan", "rewrite"), "normprobe.mending"),
    **dict.fromkeys(
        (
            "AddFinalNorm",
            "AddOutputNorms",
            "AddQKNorm",
            "Effect",
            "Fixup",
            "FoldBatchNorm",
            "FoldGains",
            "FreezeBatchNorm",
            "FuseNorms",
            "Initialise",
            "MuP",
            "PlainWeights",
            "Plan",
            "Proof",
            "QKClip",
            "Reparametrise",
            "RemoveNorms",
            "Rewrite",
            "ScaleResidual",
            "SetEps",
            "StoreGains",
            "ToDyT",
            "ToGroupNorm",
            "ToPostNorm",
            "ToRMSNorm",
            "ToSyncBatchNorm",
            "UpcastNorms",
        ),
        "normprobe.rewrites",
    ),
    "coordinate_check": "normprobe.sweeping.check",
    **dict.fromkeys(("AdaptiveClipping", "decay_groups", "parameter_groups"), "normprobe.optimising"),
    **dict.fromkeys(("apply_manifest", "load"), "normprobe.patching.load"),
    "diff": "normprobe.diffing.run",
    "DiffReport": "normprobe.report.diffs.report",
    "load_settings": "normprobe.checks.configuration",
    "probe": "normprobe.probing",
    "Report": "normprobe.report.report",
    "Settings": "normprobe.records.settings",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `normprobe --help` need not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'normprobe' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
