"""What attention logits do (4xx)."""

from normprobe.checks.attention.unresolved_logits import UnresolvedLogits
from normprobe.checks.base import Check

ALL: tuple[Check, ...] = (UnresolvedLogits(),)
