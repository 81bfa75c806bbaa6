"""What a norm by itself does wrong (1xx)."""

from normprobe.checks.base import Check
from normprobe.checks.norms.dead_gain import DeadGain
from normprobe.checks.norms.doubled_offset import DoubledOffset
from normprobe.checks.norms.eps_differs_from_config import EpsDiffersFromConfig
from normprobe.checks.norms.eps_dominates_signal import EpsDominatesSignal
from normprobe.checks.norms.eps_outside_root import EpsOutsideRoot
from normprobe.checks.norms.eps_vanishes_in_dtype import EpsVanishesInDtype
from normprobe.checks.norms.frozen_by_rounding import FrozenByRounding
from normprobe.checks.norms.gain_after_downcast import GainAfterDowncast
from normprobe.checks.norms.half_precision_reduction import HalfPrecisionReduction
from normprobe.checks.norms.lost_norm_keys import LostNormKeys
from normprobe.checks.norms.mixed_eps import MixedEps
from normprobe.checks.norms.name_contradicts_behaviour import NameContradictsBehaviour
from normprobe.checks.norms.norm_weight_decay import NormWeightDecay
from normprobe.checks.norms.outlier_gain import OutlierGain
from normprobe.checks.norms.unfused_norm import UnfusedNorm
from normprobe.checks.norms.uninitialised_gain import UninitialisedGain

ALL: tuple[Check, ...] = (
    EpsOutsideRoot(),
    EpsVanishesInDtype(),
    EpsDominatesSignal(),
    EpsDiffersFromConfig(),
    MixedEps(),
    HalfPrecisionReduction(),
    GainAfterDowncast(),
    NameContradictsBehaviour(),
    UninitialisedGain(),
    DeadGain(),
    OutlierGain(),
    DoubledOffset(),
    LostNormKeys(),
    NormWeightDecay(),
    FrozenByRounding(),
    UnfusedNorm(),
)
