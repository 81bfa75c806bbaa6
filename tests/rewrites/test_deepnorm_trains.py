"""What DeepNorm is for: a post-norm stack of 48 blocks that learns nothing starts to train after the rewrite."""

from __future__ import annotations

from tests.rewrites.deep import LEARNED, RATES, SEEDS, last_loss

RUNS = [(rate, seed) for rate in RATES for seed in SEEDS]


def test_eight_of_nine_train_after_the_rewrite() -> None:
    losses = [last_loss(rate, seed, rewritten=True) for rate, seed in RUNS]
    assert sum(loss < LEARNED for loss in losses) >= 8, losses


def test_one_of_nine_at_most_trains_before_it() -> None:
    losses = [last_loss(rate, seed, rewritten=False) for rate, seed in RUNS]
    assert sum(loss < LEARNED for loss in losses) <= 1, losses
