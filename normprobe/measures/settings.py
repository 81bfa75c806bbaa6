"""What measures are asked for, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normprobe.errors import SettingError
from normprobe.records.extras import EXTRA_NAMES


def check_names(names: Sequence[str]) -> None:
    """Refuse a name that no measure has.

    Raises:
        SettingError: for the first such name.
    """
    for name in names:
        if name not in EXTRA_NAMES:
            raise SettingError(f"unknown measure {name!r}", expected=" | ".join(EXTRA_NAMES), found=repr(name))


def check_rate(lr: object, level: str) -> None:
    """Refuse a learning rate that is none, or that would have no effect.

    Raises:
        SettingError: `lr` is no positive number, or no gradients are taken at this level.
    """
    if lr is None:
        return
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise SettingError("the learning rate is no positive number", expected="a float above 0", found=repr(lr))
    if level != "backward":
        hint = 'pass level="backward", or leave lr= out'
        raise SettingError(
            "a learning rate was given, but no gradients are taken", expected='level="backward"', found=level, hint=hint
        )
