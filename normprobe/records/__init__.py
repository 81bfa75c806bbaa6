"""Frozen results that hold no tensors and go to JSON and back."""

from normprobe.records.anatomy import (
    Anatomy,
    AttentionSite,
    Branch,
    BranchScale,
    Entry,
    Head,
    HeadRows,
    QKNorm,
    RawEnd,
    Stream,
)
from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.bounded import BoundedNorm
from normprobe.records.computed_weights import ComputedWeight
from normprobe.records.declared import Declared
from normprobe.records.fixes import Fix
from normprobe.records.gradients import BranchGradient, GradientLaw, GradientMeasure, KindGradients, LayerGradient
from normprobe.records.init import Initialisation, RoleMeasure, WeightMeasure
from normprobe.records.measurements import (
    AttentionMeasure,
    HeadLogits,
    Level,
    Margins,
    Measurements,
)
from normprobe.records.non_finite import BrokenTensor, NonFinite
from normprobe.records.norm_gains import Elements, NormGain
from normprobe.records.norms import NormSite, NormSpec
from normprobe.records.repeats import RepeatedNorm
from normprobe.records.report import (
    SCHEMA,
    Finding,
    Ignored,
    ReportData,
    Severity,
    Skipped,
    Target,
)
from normprobe.records.residual import (
    Growth,
    Headroom,
    MassiveActivation,
    OutlierChannel,
    StreamMeasure,
    StreamState,
)
from normprobe.records.settings import FailOn, Settings
from normprobe.records.sites import OpSite
from normprobe.records.weights import Reparametrization, WeightSite

__all__ = [
    "SCHEMA",
    "Anatomy",
    "AttentionMeasure",
    "AttentionSite",
    "Basis",
    "Branch",
    "BranchGradient",
    "BranchScale",
    "BoundedNorm",
    "ComputedWeight",
    "Entry",
    "Elements",
    "BrokenTensor",
    "FailOn",
    "Declared",
    "Finding",
    "Fix",
    "GradientLaw",
    "GradientMeasure",
    "Growth",
    "Head",
    "HeadLogits",
    "Margins",
    "Headroom",
    "HeadRows",
    "Ignored",
    "LayerGradient",
    "Initialisation",
    "KindGradients",
    "Level",
    "MassiveActivation",
    "Measurements",
    "NonFinite",
    "NormGain",
    "NormSite",
    "NormSpec",
    "OpSite",
    "OutlierChannel",
    "QKNorm",
    "RawEnd",
    "Record",
    "Reparametrization",
    "RepeatedNorm",
    "ReportData",
    "RoleMeasure",
    "Severity",
    "Settings",
    "Skipped",
    "Stream",
    "StreamMeasure",
    "StreamState",
    "Target",
    "WeightMeasure",
    "WeightSite",
]
