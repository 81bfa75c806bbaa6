"""`verify()`: all classic results, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from normprobe.records.verification import Verified
from normprobe.verifying import norms, signal

Progress = Callable[[str, int, int], None]
RESULTS: dict[str, Callable[[], Iterator[Verified]]] = {
    "norms": norms.norms,
    "shifts": norms.shifts,
    "batchnorm": norms.batchnorm,
    "gradients": signal.gradients,
    "relu": signal.relu,
    "growth": signal.growth,
}


def verify(progress: Progress | None = None) -> tuple[Verified, ...]:
    """Reproduce six classic results with normprobe's own measures on small models, in float32 or wider on the CPU.

    Torch's random state is left as it was.

    Args:
        progress: called as `progress(result, done, total)`.

    Returns:
        One record for each number: what was measured, what was expected, and whether they agree.
    """
    found = list[Verified]()
    with torch.random.fork_rng(devices=()):
        for done, (name, result) in enumerate(RESULTS.items()):
            if progress is not None:
                progress(name, done, len(RESULTS))
            found += result()
    return tuple(found)
