"""Fresh values for one weight, the same for the same seed and name on every device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.records import WeightSite
from normprobe.rewrites.edits import PART, parts_of
from normprobe.rewrites.initialise.schemes import Draw


@dataclass(frozen=True)
class Drawing:
    """How output features of a weight are drawn; `rows` None: all of them."""

    draw: Draw
    rows: tuple[int, ...] | None = None


def fresh(site: WeightSite, drawings: Sequence[Drawing], seed: int) -> Iterator[Tensor]:
    """Values of the shape of `site` in float32 on the processor, part by part in the order of memory.

    Args:
        site: whose `output_axis` says what is a row; of `experts` each matrix is drawn alone.
        drawings: the distributions, which together have all rows.
        seed: together with the parameter's name it decides the values, so that a choice of weights changes no other.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {site.parameter}".encode()))  # it takes 32 bits
    if len(drawings) == 1 and drawings[0].rows is None and drawings[0].draw.distribution != "orthogonal":
        return _parts(math.prod(site.shape), site, drawings[0].draw, generator)
    values = torch.empty(tuple(site.shape))
    for drawing in drawings:
        rows = torch.arange(values.shape[site.output_axis]) if drawing.rows is None else torch.tensor(drawing.rows)
        part = values.index_select(site.output_axis, rows)
        _fill(part, site, drawing.draw, generator)
        values.index_copy_(site.output_axis, rows, part)
    return parts_of(values)


def _parts(count: int, site: WeightSite, draw: Draw, generator: torch.Generator) -> Iterator[Tensor]:
    """The values that one call for all of them would draw: normal ones come by 16 (no part but a whole tensor is
    smaller), and the last 16 are drawn again where they are no full 16."""
    start = 0
    while start < count:
        end = count if count - start < 2 * PART else start + PART
        part = torch.empty(end - start)
        _fill(part, site, draw, generator)
        yield part
        start = end


def _fill(values: Tensor, site: WeightSite, draw: Draw, generator: torch.Generator) -> None:
    if draw.distribution == "zero":
        values.zero_()
    elif draw.distribution == "uniform":
        bound = math.sqrt(3) * draw.std
        values.uniform_(-bound, bound, generator=generator)
    else:
        values.normal_(0.0, 1.0, generator=generator)
        if draw.distribution == "orthogonal":
            _orthogonalise(values, site)
        values.mul_(draw.std)


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
