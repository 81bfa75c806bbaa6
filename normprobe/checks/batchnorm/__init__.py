"""Batch norms (7xx)."""

from normprobe.checks.base import Check
from normprobe.checks.batchnorm.batch_norm_over_padding import BatchNormOverPadding
from normprobe.checks.batchnorm.small_batch import SmallBatch
from normprobe.checks.batchnorm.stale_statistics import StaleStatistics
from normprobe.checks.batchnorm.thawing_batch_norm import ThawingBatchNorm
from normprobe.checks.batchnorm.train_eval_gap import TrainEvalGap
from normprobe.checks.batchnorm.unsynchronised_batch_norm import UnsynchronisedBatchNorm

ALL: tuple[Check, ...] = (
    TrainEvalGap(),
    SmallBatch(),
    BatchNormOverPadding(),
    UnsynchronisedBatchNorm(),
    StaleStatistics(),
    ThawingBatchNorm(),
)
