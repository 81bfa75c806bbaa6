"""Norms of weights, bounded stand-ins, and streams that constants hold (8xx)."""

from normprobe.checks.base import Check
from normprobe.checks.norm_free.dyt_alpha import DytAlpha
from normprobe.checks.norm_free.nfnet_scale import NfnetScale
from normprobe.checks.norm_free.zero_norm_weight import ZeroNormWeight
from normprobe.checks.norm_free.zero_variance_filter import ZeroVarianceFilter

ALL: tuple[Check, ...] = (
    ZeroNormWeight(),
    DytAlpha(),
    NfnetScale(),
    ZeroVarianceFilter(),
)
