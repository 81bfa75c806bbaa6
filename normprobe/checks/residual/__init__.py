"""What the residual stream does (3xx)."""

from normprobe.checks.base import Check
from normprobe.checks.residual.collapsing_tokens import CollapsingTokens
from normprobe.checks.residual.dead_branch import DeadBranch
from normprobe.checks.residual.diluted_branches import DilutedBranches
from normprobe.checks.residual.growth_above_sqrt import GrowthAboveSqrt
from normprobe.checks.residual.half_headroom import HalfHeadroom
from normprobe.checks.residual.lost_in_rounding import LostInRounding
from normprobe.checks.residual.massive_activations import MassiveActivations
from normprobe.checks.residual.missing_skip import MissingSkip
from normprobe.checks.residual.overwriting_branch import OverwritingBranch

ALL: tuple[Check, ...] = (
    GrowthAboveSqrt(),
    DilutedBranches(),
    MassiveActivations(),
    HalfHeadroom(),
    DeadBranch(),
    OverwritingBranch(),
    LostInRounding(),
    CollapsingTokens(),
    MissingSkip(),
)
