"""Fresh values for one weight, the same for the same seed and name on every device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.records import WeightSite
from normprobe.rewrites.edits import Parts
from normprobe.rewrites.initialise.schemes import Draw

BLOCK = 1 << 20  # values that one generator draws


@dataclass(frozen=True)
class Drawing:
    """How output features of a weight are drawn; `rows` None: all of them."""

    draw: Draw
    rows: tuple[int, ...] | None = None


def fresh(site: WeightSite, drawings: Sequence[Drawing], seed: int) -> Parts:
    """Values of the shape of `site` in float32 on the processor.

    Args:
        site: whose `output_axis` says what is a row; of `experts` each matrix is drawn alone.
        drawings: the distributions, which together have all rows.
        seed: together with the parameter's name it decides the values, so that a choice of weights changes no other.
    """
    draw = drawings[0].draw
    if draw.distribution != "orthogonal" and all(drawing.draw == draw for drawing in drawings):
        return _blocks(math.prod(site.shape), site, draw, seed)
    generator = _generator(f"{seed} {site.parameter}")
    values = torch.empty(tuple(site.shape))
    for drawing in drawings:
        rows = torch.arange(values.shape[site.output_axis]) if drawing.rows is None else torch.tensor(drawing.rows)
        part = values.index_select(site.output_axis, rows)
        _fill(part, site, drawing.draw, generator)
        values.index_copy_(site.output_axis, rows, part)
    return Parts.of(values)


def _blocks(count: int, site: WeightSite, draw: Draw, seed: int) -> Parts:
    """Blocks of `BLOCK` values, each by a generator of its own, so that threads draw them side by side."""

    def block(start: int) -> Tensor:
        name = f"{seed} {site.parameter}" + (f" {start // BLOCK}" if start else "")
        values = torch.empty(min(BLOCK, count - start))
        _fill(values, site, draw, _generator(name))
        return values

    return Parts(BLOCK, block)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))  # it takes 32 bits


def _fill(values: Tensor, site: WeightSite, draw: Draw, generator: torch.Generator) -> None:
    if draw.distribution == "zero":
        values.zero_()
    elif draw.distribution == "uniform":
        bound = math.sqrt(3) * draw.std
        values.uniform_(-bound, bound, generator=generator)
    elif draw.distribution == "orthogonal":
        values.normal_(0.0, 1.0, generator=generator)
        _orthogonalise(values, site)
        values.mul_(draw.std)
    else:
        values.normal_(0.0, draw.std, generator=generator)


def _orthogonalise(values: Tensor, site: WeightSite) -> None:
    """Matrices (all inputs, outputs) get orthonormal columns, or rows where these are fewer: the Q of what they hold,
    its signs by those of R's diagonal, which makes normal matrices uniform (Mezzadri 2007, sec. 5)."""
    flat = values.movedim(site.output_axis, -1)  # a view: (…, inputs, outputs)
    batch = flat.shape[:1] if site.kind == "experts" else ()
    matrices = flat.reshape(*batch, -1, flat.shape[-1])
    wide = matrices.shape[-2] < matrices.shape[-1]
    q, r = torch.linalg.qr(matrices.mT if wide else matrices)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    flat.copy_((q.mT if wide else q).reshape(flat.shape))
