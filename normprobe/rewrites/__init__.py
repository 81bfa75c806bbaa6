"""Rewrites: change a live model through its Anatomy, prove what was done, and take it back."""

from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey
from normprobe.rewrites.batchnorm import FoldBatchNorm, FreezeBatchNorm, ToGroupNorm, ToSyncBatchNorm
from normprobe.rewrites.catalogue import ALL, find, load
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
from normprobe.rewrites.plan import Plan, make_plan
from normprobe.rewrites.proof import Proof
from normprobe.rewrites.qk import AddQKNorm, QKClip
from normprobe.rewrites.reparametrise import PlainWeights, Reparametrise
from normprobe.rewrites.residual import Fixup, ScaleResidual, ToPostNorm

__all__ = [
    "ALL",
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
    "Refusal",
    "RemoveNorms",
    "Reparametrise",
    "Rewrite",
    "ScaleResidual",
    "SetEps",
    "Site",
    "Sites",
    "StoreGains",
    "Survey",
    "ToDyT",
    "ToGroupNorm",
    "ToPostNorm",
    "ToRMSNorm",
    "ToSyncBatchNorm",
    "UpcastNorms",
    "find",
    "load",
    "make_plan",
]
