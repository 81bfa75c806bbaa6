"""How a checkpoint is patched, and how a long run tells where it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from normprobe.errors import SettingError
from normprobe.records import Level
from normprobe.rewrites import Effect, Rewrite
from normprobe.targets.options import TargetOptions

# Tokens of a row on which nothing is measured. The tolerance is the distance to a wider copy, one draw of rounding for
# each token. A model of which no such copy is made has a tolerance that is chosen, for few tokens as for many, and each
# of them reads all weights anew.
FEW, FEWEST = 32, 5
_MOST_ROOM = 4 << 30  # bytes; a wider copy of a larger model would take minutes to run
Tell = Callable[[str, int, int], object]  # stage, bytes done, bytes in all


@dataclass(frozen=True)
class PatchOptions:
    """How a checkpoint is patched.

    Attributes:
        overwrite: whether the new folder may take the place of one that exists.
        max_shard_bytes: of a weight file; None keeps the files of the source.
        mend: the worst effect of what is applied for findings, after the rewrites: exact, calibrated or breaking; None
            for nothing.
        as_type: the `model_type` of transformers to write it as, if it computes the same; None for its own.
        level: of the audits before and after; None for none.
        target: how the checkpoint is read, and which inputs are made for it.

    Raises:
        SettingError: `mend` names no effect.
    """

    overwrite: bool = False
    max_shard_bytes: int | None = None
    mend: str | None = None
    as_type: str | None = None
    level: Level | None = "forward"
    target: TargetOptions = field(default_factory=TargetOptions)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        effects = [effect.value for effect in Effect]
        if self.mend not in (None, *effects):
            raise SettingError("mend names no effect", expected=" | ".join(effects), found=repr(self.mend))

    def reading(self) -> TargetOptions:
        """How the checkpoint is read."""
        return replace(self.target, own_weights=True)

    def inputs_for(self, rewrites: Sequence[Rewrite], size: int) -> TargetOptions:
        """How inputs are made for a model of `size` bytes: where nothing is measured on them, a short row proves as
        much as a long one, and runs sooner."""
        measured = self.level or self.mend or any(map(_measures, rewrites))
        given = self.target.tokens is not None or self.target.text is not None or self.target.text_file is not None
        if measured or given:
            return self.target
        return replace(self.target, tokens=FEW if 2 * size <= _MOST_ROOM else FEWEST)


def _measures(rewrite: Rewrite) -> bool:
    return rewrite.effect is Effect.CALIBRATED or type(rewrite).fit is not Rewrite.fit


def room() -> int:
    """Bytes of memory that a copy of a model may take to prove a rewrite: a quarter of what is free, up to 4 GiB."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return 0
    return min(free // 4, _MOST_ROOM)
