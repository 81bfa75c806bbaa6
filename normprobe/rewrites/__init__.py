"""Rewrites: change a live model through its Anatomy, prove what was done, and take it back."""

from normprobe.rewrites.add_final_norm import AddFinalNorm
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey
from normprobe.rewrites.catalogue import ALL, find, load
from normprobe.rewrites.initialise import Initialise
from normprobe.rewrites.plan import Plan, make_plan
from normprobe.rewrites.proof import Proof
from normprobe.rewrites.qk import AddQKNorm, QKClip
from normprobe.rewrites.to_rmsnorm import ToRMSNorm
from normprobe.rewrites.upcast_norms import UpcastNorms

__all__ = [
    "ALL",
    "AddFinalNorm",
    "AddQKNorm",
    "Effect",
    "Initialise",
    "Plan",
    "Proof",
    "QKClip",
    "Refusal",
    "Rewrite",
    "Site",
    "Sites",
    "Survey",
    "ToRMSNorm",
    "UpcastNorms",
    "find",
    "load",
    "make_plan",
]
