"""Norms of the heads of queries or keys, and the layer that applies them behind a projection."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from normprobe.rewrites.swap import Layer

Kind = Literal["rmsnorm", "layernorm", "l2norm"]
Part = tuple[str, tuple[tuple[int, ...], ...]]  # name of the norm, output features of each row that it norms


class HeadNorm(nn.Module):
    """Norm over the features of each head, with a gain for each head or one for all.

    x: (…, H, d) -> (…, H, d) in the input's dtype; the statistic is taken in float32 or wider. RMSNorm (Zhang &
    Sennrich 2019, eq. 4), LayerNorm without offset (Ba et al. 2016, eq. 3), or x / ‖x‖ with a learned length (Henry
    et al. 2020, eq. 3).

    Args:
        kind: rmsnorm | layernorm | l2norm.
        heads: H; 1 where one gain serves all heads.
        features: d.
        eps: inside the root; of the l2norm under the length.
    """

    def __init__(self, kind: Kind, heads: int, features: int, eps: float, **place: Any) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.eps = eps
        self.features = features
        gains = 1 if kind == "l2norm" else features
        self.weight = nn.Parameter(torch.ones((heads, gains) if heads > 1 else (gains,), **place))
        self.set_rms(torch.ones(heads))

    @torch.no_grad()
    def set_rms(self, rms: Tensor) -> None:
        """Let the rows of each head have this RMS: (H,); of several heads with one gain the median."""
        gain = rms * self.features**0.5 if self.kind == "l2norm" else rms
        self.weight.copy_(gain.unsqueeze(-1).expand(self.weight.shape) if self.weight.dim() > 1 else gain.median())

    def longest(self) -> Tensor:
        """L2 norm that no row of each head exceeds, in float64: (H,), (1,) where one gain serves all heads."""
        gain = self.weight.detach().double().abs().reshape(-1, self.weight.shape[-1]).amax(-1)
        return gain if self.kind == "l2norm" else gain * self.features**0.5

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layernorm":
            wide = wide - wide.mean(-1, keepdim=True)
        square = wide.square()
        statistic = square.sum(-1, keepdim=True) if self.kind == "l2norm" else square.mean(-1, keepdim=True)
        return (wide * torch.rsqrt(statistic + self.eps) * self.weight.to(wide.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        """Kind, shape of the gain, eps."""
        return f"{self.kind}, gain {tuple(self.weight.shape)}, eps={self.eps:g}"


@final
class NormedHeads(Layer):
    """Norms the queries or keys among the output features of the projection below."""

    NOTE = "norms queries or keys of its output (normprobe)"
    KEY: ClassVar[str] = "_head_norms"
    ASIDE: ClassVar[str] = "_head_norms_aside"  # set while the model runs as it was

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; its output is (…, features)."""
        output = super().forward(*args, **kwargs)
        for name, rows in () if self.__dict__.get(NormedHeads.ASIDE) else self.__dict__[NormedHeads.KEY]:
            output = _normed(output, self.get_submodule(name), rows)
        return output


def _normed(output: Tensor, norm: nn.Module, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    heads, features, start = len(rows), len(rows[0]), rows[0][0]
    size, rest = heads * features, output.shape[-1] - start - heads * features
    flat = [feature for row in rows for feature in row]
    if flat != list(range(start, start + size)):  # heads of queries, keys and values lie between one another
        place = torch.tensor(flat, device=output.device)
        return output.index_copy(-1, place, _by_head(output.index_select(-1, place), norm, heads))
    part = _by_head(output.narrow(-1, start, size), norm, heads)
    if size == output.shape[-1]:
        return part
    return torch.cat((output.narrow(-1, 0, start), part, output.narrow(-1, start + size, rest)), -1)


def _by_head(x: Tensor, norm: nn.Module, heads: int) -> Tensor:
    normed: Tensor = norm(x.reshape(*x.shape[:-1], heads, -1))
    return normed.flatten(-2)
