"""What DeepNorm is for: a deep post-norm stack that learns nothing starts to train after the rewrite."""

from __future__ import annotations

import pytest

from benchmarks.deepnorm import WAYS, section
from tests.rewrites.deep import BLOCKS, GRID, RATES, SEEDS, STEPS, Made, Trained, train

DEEP, SHORT = 24, 20  # deep enough not to start, and by when one that trains has begun to; the table has more of both


def learned(how: Made) -> tuple[int, list[float]]:
    """How many of a grid train, its rates twice those of the table, and all losses."""
    runs = [train(how, 2 * rate, seed, steps=SHORT, blocks=DEEP) for rate, seed in GRID]
    return sum(run.learned for run in runs), [run.loss for run in runs]


def test_eight_of_nine_train_after_the_rewrite() -> None:
    count, losses = learned("deepnorm")
    assert count >= 8, losses


def test_one_of_nine_at_most_trains_before_it() -> None:
    count, losses = learned("post")
    assert count <= 1, losses


def test_a_pre_norm_stack_is_rewritten_into_one_that_trains_alike() -> None:
    short = {"steps": SHORT // 2, "blocks": DEEP}
    assert train("pre to deepnorm", RATES[1], SEEDS[0], **short).loss == pytest.approx(
        train("deepnorm", RATES[1], SEEDS[0], **short).loss, rel=1e-3
    )


def test_the_gradient_that_sits_at_the_top_is_spread_by_the_rewrite() -> None:
    before, after = (train(how, RATES[0], SEEDS[0], steps=1).top for how in ("post", "deepnorm"))
    assert before > 0.6
    assert 0.15 < after < 0.35


def test_the_table_counts_what_trains() -> None:
    half = [Trained(0.5 if rate == RATES[0] else 2.8, 0.75) for rate, _ in GRID]
    text = section({way: half for way in WAYS})
    row = next(line for line in text.splitlines() if line.startswith(f"| {WAYS[0].name} |"))
    assert row == f"| {WAYS[0].name} | 0 | {STEPS} | 75 % | 3 of 9 | 0.50 | 2.80 | 2.80 |"
    assert f"{BLOCKS} blocks" in text
