"""All rewrites by name, and back from plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from normprobe.errors import RewriteError
from normprobe.rewrites.add_final_norm import AddFinalNorm
from normprobe.rewrites.base import Rewrite
from normprobe.rewrites.initialise import Initialise
from normprobe.rewrites.qk import AddQKNorm, QKClip
from normprobe.rewrites.to_rmsnorm import ToRMSNorm
from normprobe.rewrites.upcast_norms import UpcastNorms

ALL: tuple[type[Rewrite], ...] = (UpcastNorms, AddFinalNorm, ToRMSNorm, AddQKNorm, QKClip, Initialise)


def find(name: str) -> type[Rewrite] | None:
    """The rewrite that findings call `name`; None where there is none."""
    return next((each for each in ALL if each.name == name), None)


def load(values: Mapping[str, Any]) -> Rewrite:
    """The rewrite that `Rewrite.to_dict` gave.

    Raises:
        RewriteError: an unknown rewrite, or values that it does not have.
    """
    kind = find(str(values.get("rewrite")))
    if kind is None:
        names = " | ".join(each.name for each in ALL)
        raise RewriteError("unknown rewrite", expected=names, found=repr(values.get("rewrite")))
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in values.items() if name != "rewrite"}
    if not given.keys() <= known:
        raise RewriteError(f"unknown setting of {kind.name}", expected=", ".join(sorted(known)), found=", ".join(given))
    return kind(**given)
