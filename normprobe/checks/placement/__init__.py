"""Where norms sit (2xx)."""

from normprobe.checks.base import Check
from normprobe.checks.placement.declared_not_computed import DeclaredNotComputed
from normprobe.checks.placement.deep_post_norm import DeepPostNorm
from normprobe.checks.placement.deepnorm_incomplete import DeepNormIncomplete
from normprobe.checks.placement.doubled_final_norm import DoubledFinalNorm
from normprobe.checks.placement.lopsided_qk_norm import LopsidedQKNorm
from normprobe.checks.placement.misplaced_final_norm import MisplacedFinalNorm
from normprobe.checks.placement.missing_branch_norm import MissingBranchNorm
from normprobe.checks.placement.missing_final_norm import MissingFinalNorm
from normprobe.checks.placement.mixed_placement import MixedPlacement
from normprobe.checks.placement.norm_across_tokens import NormAcrossTokens
from normprobe.checks.placement.norm_on_trunk import NormOnTrunk
from normprobe.checks.placement.norm_twice import NormTwice
from normprobe.checks.placement.qk_norm_wrong_axis import QKNormWrongAxis
from normprobe.checks.placement.unused_norm import UnusedNorm

ALL: tuple[Check, ...] = (
    MissingFinalNorm(),
    DoubledFinalNorm(),
    MisplacedFinalNorm(),
    NormOnTrunk(),
    DeepPostNorm(),
    MixedPlacement(),
    NormTwice(),
    UnusedNorm(),
    LopsidedQKNorm(),
    QKNormWrongAxis(),
    DeepNormIncomplete(),
    DeclaredNotComputed(),
    MissingBranchNorm(),
    NormAcrossTokens(),
)
