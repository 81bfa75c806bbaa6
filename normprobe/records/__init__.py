"""Frozen results that hold no tensors and go to JSON and back."""

from normprobe.records.anatomy import (
    Anatomy,
    AttentionSite,
    Branch,
    BranchScale,
    Head,
    HeadRows,
    OpSite,
    QKNorm,
    Reparametrization,
    Stream,
    WeightSite,
)
from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.measurements import (
    AttentionMeasure,
    BranchGradient,
    GradientMeasure,
    Growth,
    HeadLogits,
    Headroom,
    Level,
    MassiveActivation,
    Measurements,
    StreamMeasure,
    StreamState,
)
from normprobe.records.norms import NormSite, NormSpec
from normprobe.records.report import (
    SCHEMA,
    Finding,
    ReportData,
    Severity,
    Skipped,
    Target,
)

__all__ = [
    "SCHEMA",
    "Anatomy",
    "AttentionMeasure",
    "AttentionSite",
    "Basis",
    "Branch",
    "BranchGradient",
    "BranchScale",
    "Finding",
    "GradientMeasure",
    "Growth",
    "Head",
    "HeadLogits",
    "Headroom",
    "HeadRows",
    "Level",
    "MassiveActivation",
    "Measurements",
    "NormSite",
    "NormSpec",
    "OpSite",
    "QKNorm",
    "Record",
    "Reparametrization",
    "ReportData",
    "Severity",
    "Skipped",
    "Stream",
    "StreamMeasure",
    "StreamState",
    "Target",
    "WeightSite",
]
