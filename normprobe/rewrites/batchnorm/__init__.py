"""Rewrites of batch norms: frozen, synchronised, folded into the weights before them, or norms of single samples."""

from normprobe.rewrites.batchnorm.fold import FoldBatchNorm
from normprobe.rewrites.batchnorm.freeze import FreezeBatchNorm
from normprobe.rewrites.batchnorm.to_group import ToGroupNorm
from normprobe.rewrites.batchnorm.to_sync import ToSyncBatchNorm

__all__ = ["FoldBatchNorm", "FreezeBatchNorm", "ToGroupNorm", "ToSyncBatchNorm"]
