"""The rewrites that the options of the command name, in the order in which they are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """What the options say; each field is one of them, None or empty where it was not given.

    Attributes:
        further: those of a recipe.
        order: the options in the order in which they were given; those that are not in it come last.
    """

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
    further: Sequence[Rewrite] = ()
    order: Sequence[str] = ()

    def rewrites(self) -> tuple[Rewrite, ...]:
        """Those that were asked for, in `order`: without one those of a recipe, then weights, norms, branches and
        attention, then by name.

        Raises:
            SettingError: a name or value is unknown, or --only or --seed is given and nothing takes it.
        """
        named = [*self._named()]
        left: dict[str, list[tuple[Rewrite, ...]]] = {"recipe": [tuple(self.further)]}
        for option, name, values in named:
            left.setdefault(option, []).append((made(name, self._chosen(name, values)),))
        left["rewrite"] = [(read_words(each),) for each in self.rewrite]
        self._check_used([name for _, name, _ in named])
        flags = {option for option in left if getattr(self, option, None) is True}
        for option in (each for each in left if each not in flags and self.order.count(each) > len(left[each])):
            name = f"--{option.replace('_', '-')}"
            hint = "--rewrite, or a recipe, takes several of a kind in their order"
            raise SettingError(f"{name} is given twice", expected="once", hint=hint)
        taken = [left[option].pop(0) for option in self.order if left.get(option)]
        rest = [each for found in left.values() for each in found]
        return tuple(rewrite for each in (*taken, *rest) for rewrite in each)

    def _named(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Each option with the rewrite that it stands for, and the settings of that."""
        if self.init is not None:
            yield "init", "Initialise", {"scheme": self.init, **({} if self.seed is None else {"seed": self.seed})}
        yield from (("swap", *_swapped(each)) for each in self.swap)
        if self.upcast_norms:
            yield "upcast_norms", "UpcastNorms", {}
        if self.eps is not None:
            yield "eps", "SetEps", {"eps": self.eps}
        if self.fold_norms:
            yield "fold_norms", "FoldGains", {}
        if self.final_norm:
            yield "final_norm", "AddFinalNorm", {}
        if self.output_norms is not None:
            yield "output_norms", "AddOutputNorms", {"start": self.output_norms}
        if self.residual is not None:
            yield "residual", "ScaleResidual", {"kind": self.residual}
        if self.qk_norm is not None:
            eps = {} if self.eps is None else {"eps": self.eps}
            yield "qk_norm", "AddQKNorm", {**_qk_norm(self.qk_norm), **eps}
        if self.qk_clip is not None:
            yield "qk_clip", "QKClip", {"limit": self.qk_clip}

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
