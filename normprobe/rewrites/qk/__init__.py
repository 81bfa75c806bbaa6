"""Keep attention logits small: by clipping the weights of single heads."""

from normprobe.rewrites.qk.clip import QKClip

__all__ = ["QKClip"]
