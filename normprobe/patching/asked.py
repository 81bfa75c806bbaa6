"""The rewrites that the options of the command name, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from normprobe.errors import SettingError
from normprobe.patching.recipe import made, read_words
from normprobe.rewrites import Rewrite, find
from normprobe.rewrites.base import ChosenRewrite

_SWAPS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("layernorm", "rmsnorm"): ("ToRMSNorm", {}),
    ("norm", "dyt"): ("ToDyT", {}),
    ("batchnorm", "groupnorm"): ("ToGroupNorm", {}),
    ("batchnorm", "syncbatchnorm"): ("ToSyncBatchNorm", {}),
    ("batchnorm", "frozen"): ("FreezeBatchNorm", {}),
    ("pre", "post"): ("ToPostNorm", {}),
    ("weight", "one_plus_weight"): ("StoreGains", {"stored": "one_plus_weight"}),
    ("one_plus_weight", "weight"): ("StoreGains", {"stored": "weight"}),
}
_SHARED = "shared"
SWAPS = tuple(":".join(pair) for pair in _SWAPS)


@dataclass(frozen=True)
class Asked:
    """What the options say; each field is one of them, None or empty where it was not given."""

    upcast_norms: bool = False
    eps: float | None = None
    swap: Sequence[str] = ()
    fold_norms: bool = False
    final_norm: bool = False
    output_norms: str | None = None
    residual: str | None = None
    init: str | None = None
    qk_norm: str | None = None
    qk_clip: float | None = None
    rewrite: Sequence[str] = ()
    only: Sequence[str] = ()
    seed: int | None = None
    further: Sequence[Rewrite] = field(default=())  # of a recipe

    def rewrites(self) -> tuple[Rewrite, ...]:
        """Those that were asked for: of a recipe first, then weights, norms, branches and attention, then by name.

        Raises:
            SettingError: a name or value is unknown, or --only or --seed is given and nothing takes it.
        """
        named = [*self._named()]
        words = [read_words(each) for each in self.rewrite]
        found = [made(name, self._chosen(name, values)) for name, values in named]
        self._check_used([name for name, _ in named])
        return (*self.further, *found, *words)

    def _named(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.init is not None:
            yield "Initialise", {"scheme": self.init, **({} if self.seed is None else {"seed": self.seed})}
        yield from (_swapped(each) for each in self.swap)
        if self.upcast_norms:
            yield "UpcastNorms", {}
        if self.eps is not None:
            yield "SetEps", {"eps": self.eps}
        if self.fold_norms:
            yield "FoldGains", {}
        if self.final_norm:
            yield "AddFinalNorm", {}
        if self.output_norms is not None:
            yield "AddOutputNorms", {"start": self.output_norms}
        if self.residual is not None:
            yield "ScaleResidual", {"kind": self.residual}
        if self.qk_norm is not None:
            yield "AddQKNorm", {**_qk_norm(self.qk_norm), **({} if self.eps is None else {"eps": self.eps})}
        if self.qk_clip is not None:
            yield "QKClip", {"limit": self.qk_clip}

    def _chosen(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "only": tuple(self.only)} if self.only and _chooses(name) else values

    def _check_used(self, names: Sequence[str]) -> None:
        if self.only and sum(map(_chooses, names)) != 1:
            found = ", ".join(names) or "none"
            hint = "--rewrite 'SetEps(only=…)', or a recipe, says it for each"
            raise SettingError("--only belongs to one rewrite", expected="one that takes it", found=found, hint=hint)
        if self.seed is not None and self.init is None:
            raise SettingError("--seed has no effect without --init", hint="leave it out")


def _chooses(name: str) -> bool:
    """Whether places can be chosen for a rewrite."""
    return issubclass(find(name) or Rewrite, ChosenRewrite)


def _swapped(words: str) -> tuple[str, dict[str, Any]]:
    before, _, after = words.lower().partition(":")
    if (before, after) not in _SWAPS:
        raise SettingError("--swap names no exchange", expected=", ".join(SWAPS), found=words)
    return _SWAPS[before, after]


def _qk_norm(words: str) -> dict[str, Any]:
    """`START`, and after colons the kind and `shared`."""
    start, *more = words.split(":")
    kinds = [word for word in more if word != _SHARED]
    shared = {_SHARED: True} if len(kinds) < len(more) else {}
    if len(kinds) > 1:
        raise SettingError("--qk-norm cannot be read", expected="START[:KIND][:shared]", found=words)
    return {"start": start, **({"kind": kinds[0]} if kinds else {}), **shared}
