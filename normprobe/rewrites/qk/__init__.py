"""Keep attention logits small: norms on queries and keys, and clipped heads."""

from normprobe.rewrites.qk.add import AddQKNorm
from normprobe.rewrites.qk.clip import QKClip

__all__ = ["AddQKNorm", "QKClip"]
