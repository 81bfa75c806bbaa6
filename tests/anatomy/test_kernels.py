"""Norms whose inside no recorder sees, and norms that cannot be run outside their model."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream
from tests.models import WIDTH, decoder


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


@torch.library.custom_op("normprobe_kernels::rms_norm_out", mutates_args=("out",))
def rms_norm_out(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """An operation of another library that writes its result into a tensor it is given."""
    out.copy_(rms_norm(x, weight))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class Launched(Gain):
    """Fills memory behind the dispatcher's back, as a kernel does that is launched on an address."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        out = torch.empty_like(flat)
        with _disable_current_modes():
            out.copy_(rms_norm(flat, self.weight))
        return out.view(x.shape)


def written(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.normprobe_kernels.rms_norm_out(out, x, weight)
    return out


class Written(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return written(x, self.weight)


class Locked(Gain):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Inline(Gain):
    """Norms in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(self.up(written(x, self.weight)).relu())
        return x + branch


class GatedProduct(torch.autograd.Function):
    """Launches a kernel within another module's forward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with _disable_current_modes():
            out.copy_(torch.nn.functional.silu(gate) * x)
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = GatedProduct.apply(self.gate(y), self.up(y))
        branch: Tensor = self.down(hidden)
        return x + branch


@pytest.mark.parametrize(
    ("norm", "facts"),
    [
        (Launched, {"reduction": "native", "weight_multiply": "after_cast", "fused": True}),
        (Written, {"reduction": "native", "weight_multiply": "fused", "fused": True}),
        (Locked, {"reduction": "unknown", "weight_multiply": "unknown", "fused": False}),
    ],
)
def test_a_norm_is_told_by_what_it_does(norm: type[nn.Module], facts: dict[str, Any]) -> None:
    found = anatomy_of(*decoder("pre", norm=norm))
    assert {n.path.rpartition(".")[2] for n in found.norms} == {"norm", "final"}
    for site in found.norms:
        seen = site.model_dump()
        assert {name: seen[name] for name in facts} == facts
        assert (site.kind, site.affine, site.eps, site.module) == ("rmsnorm", "weight", 1e-6, True)
        assert site.weight == f"{site.path}.weight"
    stream = only_stream(found)
    assert (stream.placement, stream.final_norm) == ("pre", "final")


def test_what_could_not_be_copied_is_said() -> None:
    report = normprobe.probe(*decoder("pre", norm=Locked), level="structure")
    (skip,) = [s for s in report.skipped if "behaviour of" in s.what]
    assert skip.what == "behaviour of blocks.0.mix.norm and 6 more"
    assert "cannot pickle" in skip.why
    assert "recorded operations were run instead" in skip.why


def test_a_result_written_into_a_given_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), Inline(), Inline())
    found = anatomy_of(model, torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
    assert [n.path for n in found.norms if not n.module] == ["1#rms_norm_out:0", "2#rms_norm_out:0"]
    assert {n.kind for n in found.norms} == {"rmsnorm"}
    assert only_stream(found).placement == "pre"


def test_the_flow_goes_through_a_kernel_inside_a_forward() -> None:
    plain = torch.autograd.Function.__dict__["apply"]
    model = nn.Sequential(nn.Linear(4, WIDTH), Gated(), Gated())
    stream = only_stream(anatomy_of(model, torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))))
    assert [(b.placement, b.pre_norm) for b in stream.branches] == [("pre", "1.norm"), ("pre", "2.norm")]
    assert {p for p in stream.branches[0].readers if "weight" in p} == {"1.gate.weight", "1.up.weight"}
    assert torch.autograd.Function.__dict__["apply"] is plain


@torch.library.custom_op("normprobe_kernels::congruence", mutates_args=())
def congruence(x: Tensor, weight: Tensor) -> Tensor:
    """No recurrence, though there is a "gru" in its name."""
    return torch.relu(x @ weight)


def test_the_name_of_an_operation_of_another_library_tells_nothing() -> None:
    class Congruent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight, self.out = nn.LayerNorm(8), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(congruence(self.norm(x), self.weight))

    (stream,) = anatomy_of(nn.Sequential(nn.Linear(8, 8), Congruent(), Congruent()), torch.randn(2, 3, 8)).streams
    assert [branch.kind for branch in stream.branches] == ["mlp", "mlp"]
