"""A rewrite has a place in the model, and as many as it was told to expect."""

from __future__ import annotations

from normprobe.errors import RewriteError
from normprobe.rewrites.base import Rewrite, Sites
from normprobe.rewrites.refusals import told_briefly
from normprobe.rewrites.rows import counted


def check_count(rewrite: Rewrite, found: Sites) -> None:
    """Hold the number of places against what is expected.

    Raises:
        RewriteError: there is none, or another number than `rewrite.expect`.
    """
    count, reasons = len(found.sites), told_briefly(found.refused)
    if rewrite.expect is not None and count != rewrite.expect:
        raise RewriteError(
            f"{rewrite.name} found another number of sites than it was told to expect",
            expected=counted(rewrite.expect, "site"),
            found=f"{counted(count, 'site')}, {len(found.refused)} refused" + (f" ({reasons})" if reasons else ""),
        )
    if count == 0 and rewrite.expect is None:
        raise RewriteError(
            f"{rewrite.name} would change nothing",
            expected="at least one site",
            found=f"{len(found.refused)} refused: {reasons}" if reasons else "no place that needs it",
            hint=f"leave it out, or say {rewrite.name}(expect=0) where none is right",
        )
