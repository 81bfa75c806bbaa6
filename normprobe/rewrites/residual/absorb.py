"""Which of the parameters that write to a stream can take a constant factor up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from normprobe.records import Anatomy

_HOMOGENEOUS = ("none", "gate", "relu", "leaky_relu")  # f(c·z) = c·f(z) for c > 0


def absorbing(anatomy: Anatomy) -> Mapping[str, str | None]:
    """For every writer, biases included, why it cannot be multiplied in place of the write; None where it can."""
    sites = {site.parameter: site for site in anatomy.weights}
    branches = [branch for stream in anatomy.streams for branch in stream.branches]
    uses = Counter(name for branch in branches for name in branch.writers)
    found: dict[str, str | None] = {}
    for name, count in uses.items():
        site = sites.get(name)
        if count > 1:
            found[name] = f"it writes {count} branches"
        elif site is not None and not {"reader", "writer"}.issuperset(site.roles):
            found[name] = f"it is used elsewhere too ({', '.join(site.roles)})"
        elif site is not None and site.followed_by not in _HOMOGENEOUS:
            found[name] = f"its product passes {site.followed_by} before it is added"
        else:
            found[name] = None
    return found
