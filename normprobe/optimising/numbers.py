"""Numbers that a caller gives, refused with words where they cannot be used."""

from __future__ import annotations

import math

from normprobe.errors import SettingError


def check_number(name: str, value: object, *, zero: bool = False) -> None:
    """Refuse what is no finite number above 0, or from 0 with `zero`.

    Raises:
        SettingError: it is none.
    """
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if math.isfinite(number) and (number > 0 or (zero and number == 0)):
        return
    expected = f"a finite number {'from' if zero else 'above'} 0"
    raise SettingError(f"the {name} cannot be used", expected=expected, found=repr(value))
