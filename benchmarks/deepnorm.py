"""What DeepNorm is for: how many of nine trainings of a deep post-norm stack start, before and after the rewrite.

    python -m benchmarks.deepnorm [--no-write]

It prints the table and writes it into docs/rewrites.md. One core takes about five minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.page import PAGE, write_section
from tests.rewrites.deep import BLOCKS, GRID, LEARNED, RATES, SEEDS, STEPS, VOCABULARY, WIDTH, Made, Trained, train

REWRITES = PAGE.with_name("rewrites.md")


@dataclass(frozen=True)
class Way:
    """How the stack is made and trained."""

    name: str
    how: Made
    warmup: int = 0
    steps: int = STEPS


WAYS = (
    Way("post-norm as it is", "post"),
    *(Way("post-norm with warmup", "post", warmup, max(STEPS, 2 * warmup)) for warmup in (10, 25, 100)),
    Way('`ScaleResidual("deepnorm")`, `Initialise("deepnorm")`', "deepnorm"),
    Way("pre-norm as it is", "pre"),
    Way('pre-norm, `ToPostNorm(deepnorm=True)`, `Initialise("deepnorm")`', "pre to deepnorm"),
)


def section(told: Mapping[Way, Sequence[Trained]]) -> str:
    """The runs of each way, in the order of `GRID`, in words and a table."""
    return "\n".join(_lines(told))


def _lines(told: Mapping[Way, Sequence[Trained]]) -> Iterator[str]:
    rates = [f"{rate:g}" for rate in RATES]
    yield f"Torch's encoder layers, {BLOCKS} blocks of width {WIDTH}, Xavier's initialisation, are to learn a"
    yield f"permutation of {VOCABULARY} tokens by Adam, at {len(RATES)} rates with {len(SEEDS)} seeds each"
    yield "(`python -m benchmarks.deepnorm`). A run trains where the mean loss of its last ten steps is below"
    yield f"{LEARNED:.2f}, half of what a model has that knows nothing. At the top: the share of the first gradient's"
    yield "squared length, over all blocks, that the upper quarter of them has."
    yield ""
    yield f"| Stack | Warmup | Steps | At the top | Trains | {' | '.join(f'Loss at {rate}' for rate in rates)} |"
    yield f"| --- | ---: | ---: | ---: | ---: |{' ---: |' * len(rates)}"
    for way, runs in told.items():
        top, count = median(run.top for run in runs), sum(run.learned for run in runs)
        losses = [[run.loss for run, (other, _) in zip(runs, GRID, strict=True) if other == rate] for rate in RATES]
        middle = " | ".join(f"{median(each):.2f}" for each in losses)
        yield f"| {way.name} | {way.warmup} | {way.steps} | {100 * top:.0f} % | {count} of {len(runs)} | {middle} |"
    yield ""
    yield "Losses are medians over the seeds; the rate grows linearly during warmup."


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-write", action="store_true", help="leave docs/rewrites.md as it is")
    options = parser.parse_args()
    told: dict[Way, list[Trained]] = {}
    for way in WAYS:
        told[way] = [train(way.how, rate, seed, warmup=way.warmup, steps=way.steps) for rate, seed in GRID]
        print(way, [round(run.loss, 3) for run in told[way]], flush=True)
    text = section(told)
    print(text)
    if not options.no_write:
        write_section("deepnorm", "DeepNorm on a deep stack", text, REWRITES)


if __name__ == "__main__":
    main()
