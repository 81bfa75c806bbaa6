"""What attention logits do (4xx)."""

from normprobe.checks.attention.attention_scale import AttentionScale
from normprobe.checks.attention.entropy_collapse import EntropyCollapse
from normprobe.checks.attention.qk_norm_advised import QKNormAdvised
from normprobe.checks.attention.saturated_heads import SaturatedHeads
from normprobe.checks.attention.unbounded_logit_scale import UnboundedLogitScale
from normprobe.checks.attention.unresolved_logits import UnresolvedLogits
from normprobe.checks.base import Check

ALL: tuple[Check, ...] = (
    UnresolvedLogits(),
    EntropyCollapse(),
    SaturatedHeads(),
    AttentionScale(),
    QKNormAdvised(),
    UnboundedLogitScale(),
)
