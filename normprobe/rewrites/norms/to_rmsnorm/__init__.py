"""LayerNorm to RMSNorm: exactly, by keeping the stream's mean at zero, or as a plain swap."""

from normprobe.rewrites.norms.to_rmsnorm.rewrite import ToRMSNorm

__all__ = ["ToRMSNorm"]
