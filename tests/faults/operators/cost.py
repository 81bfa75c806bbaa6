"""Norms that cost more time than they need to (116)."""

from __future__ import annotations

from torch import Tensor, nn

from normprobe.records import Anatomy
from tests.faults.edits import norm_at, replace
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault
from tests.faults.written import Written, along_features, written

COSTED = Conditions(level="forward", measures=("cost",))
_SPLIT = 16  # sums that are taken one by one, so that the time they take does not hang on the machine


class Slow(Written):
    """The same norm, its sums taken piece by piece."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more or x.shape[-1] % _SPLIT:
            raise NotHereError("the norm is given more than what it norms, or its width cannot be split")
        wide, count = x.float(), x.shape[-1]
        pieces = wide.split(count // _SPLIT, -1)
        mean = sum(piece.sum(-1, keepdim=True) for piece in pieces) / count
        square = sum((piece - mean).pow(2).sum(-1, keepdim=True) for piece in pieces) / count
        y = (wide - mean) / (square + self.form.eps).sqrt()
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def plain(anatomy: Anatomy) -> list[Site]:
    """One site: the first of the layer norms that torch computes in one kernel, where all norms are such, and no
    recurrence takes more time than all of them."""
    found = [site for site in along_features(anatomy) if _fused(anatomy, site.path)]
    kinds = {branch.kind for stream in anatomy.streams for branch in stream.branches}
    every = len(found) == sum(norm.executed for norm in anatomy.norms)
    return [Site(found[0].path, found)] if len(found) > 1 and every and not kinds & {"recurrent", "ssm"} else []


def _fused(anatomy: Anatomy, path: str) -> bool:
    norm = norm_at(anatomy, path)
    return norm.kind == "layernorm" and norm.fused is True and norm.eps_placement == "inside_sqrt"


@fault("every layer norm written out", "NP116", "note", plain, COSTED)
def written_out(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for one in site.detail:
        made = written(model, norm_at(anatomy, one.path))
        replace(model, one.path, Slow(made.form, made.weight, made.bias))


ALL: tuple[Fault, ...] = (written_out,)
