"""Norms that are no modules: functional calls, arithmetic written into a forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream
from tests.models import WIDTH, Attention, Built, Decoder, Mlp, decoder, ids, shuffled

Inline = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer_norm(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), gain, offset, 1e-3)


def rms_norm(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * gain


def rms_norm_outside(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2) * gain


def layer_norm_by_hand(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3) * gain + offset


def gain_around_one(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * (1 + offset)


def from_constant(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x / torch.maximum(x.pow(2).mean(-1, keepdim=True).sqrt(), torch.tensor(1e-3)) * gain


def behind_a_factor(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return rms_norm(3 * x, gain, offset)


def by_products(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x)[..., None] / WIDTH + 1e-3) * gain


def in_groups(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    y = x.unflatten(-1, (4, -1))
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3)).flatten(-2) * gain


def tanh(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return torch.tanh(gain[0] * x) * gain + offset


def softsign(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return F.softsign(gain[0] * x) * gain + offset


def inverse_root(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    return x * torch.rsqrt(gain[0] ** 2 + x.square()) * gain + offset


def response(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    size = x.norm(dim=1, keepdim=True)
    return gain * (x * (size / (size.mean(-1, keepdim=True) + 1e-3))) + offset + x


FORMS: dict[str, tuple[Inline, dict[str, object]]] = {
    "layer_norm": (
        layer_norm,
        {"kind": "layernorm", "affine": "weight+bias", "eps_placement": "inside_sqrt", "eps": 1e-3},
    ),
    "rms_norm": (rms_norm, {"kind": "rmsnorm", "affine": "weight", "eps_placement": "inside_sqrt", "eps": 1e-3}),
    "outside": (
        rms_norm_outside,
        {"kind": "rmsnorm", "affine": "weight", "eps_placement": "outside_sqrt", "eps": 1e-2},
    ),
    "by_hand": (
        layer_norm_by_hand,
        {"kind": "layernorm", "affine": "weight+bias", "eps_placement": "inside_sqrt", "eps": 1e-3},
    ),
    "from_constant": (
        from_constant,
        {"kind": "rmsnorm", "affine": "weight", "eps_placement": "clamp", "eps": 1e-3},
    ),
    "by_products": (by_products, {"kind": "rmsnorm", "affine": "weight", "eps_placement": "inside_sqrt", "eps": 1e-3}),
    "behind_a_factor": (
        behind_a_factor,
        {"kind": "rmsnorm", "affine": "weight", "eps_placement": "inside_sqrt", "eps": 1e-3},
    ),
    "in_groups": (
        in_groups,
        {"kind": "rmsnorm", "affine": "weight", "eps_placement": "inside_sqrt", "eps": 1e-3, "groups": 4},
    ),
    "tanh": (tanh, {"kind": "dyt", "affine": "weight+bias", "eps_placement": "none", "eps": None}),
    "softsign": (softsign, {"kind": "dyt", "affine": "weight+bias", "eps_placement": "none", "eps": None}),
    "inverse_root": (inverse_root, {"kind": "dyt", "affine": "weight+bias", "eps_placement": "none", "eps": None}),
    "response": (
        response,
        {"kind": "grn", "affine": "weight+bias", "eps_placement": "outside_sqrt", "eps": 1e-3},
    ),
    "one_plus": (
        gain_around_one,
        {"kind": "rmsnorm", "affine": "one_plus_weight", "eps_placement": "inside_sqrt", "eps": 1e-3},
    ),
}


class InlineBlock(nn.Module):
    def __init__(self, norm: Inline, placement: str) -> None:
        super().__init__()
        self.norm, self.placement = norm, placement
        self.mix, self.think = Attention(), Mlp()
        self.gain, self.offset = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for branch in (self.mix, self.think):
            if self.placement == "pre":
                x = x + branch(self.norm(x, self.gain, self.offset))
            else:
                x = self.norm(x + branch(x), self.gain, self.offset)
        return x


def inline(norm: Inline, placement: str = "pre") -> Built:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [InlineBlock(norm, placement) for _ in range(3)]
    final = nn.LayerNorm(WIDTH) if placement == "pre" else None
    return shuffled(Decoder(blocks, final)), ids()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_inline_norms_are_found_and_placed(form: str, placement: str) -> None:
    norm, facts = FORMS[form]
    found = anatomy_of(*inline(norm, placement))
    stream = only_stream(found)
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * 3
    assert {b.placement for b in stream.branches} == {placement}
    sites = [n for n in found.norms if not n.module]
    assert len(sites) == 6
    for site in sites:
        assert {k: getattr(site, k) for k in facts if k != "eps"} == {k: v for k, v in facts.items() if k != "eps"}
        assert site.eps == (None if facts["eps"] is None else pytest.approx(facts["eps"], rel=1e-2))
        assert site.role == placement


def test_paths_of_inline_norms_name_module_and_place() -> None:
    sites = [n for n in anatomy_of(*inline(layer_norm)).norms if not n.module]
    paths = [n.path for n in sites]
    assert len(set(paths)) == 6
    assert [p.partition("#")[0] for p in paths] == [f"blocks.{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert [p.rpartition(":")[2] for p in paths] == ["0", "1"] * 3
    assert {(n.weight, n.bias) for n in sites[:2]} == {("blocks.0.gain", "blocks.0.offset")}


def test_inline_norm_equals_the_same_norm_as_a_module() -> None:
    """Written out or as a module: everything but the path is the same."""
    written = [n for n in anatomy_of(*inline(layer_norm)).norms if not n.module]
    modules = [n for n in anatomy_of(*decoder("pre", norm=lambda: nn.LayerNorm(WIDTH, eps=1e-3))).norms]
    same = ("kind", "affine", "eps_placement", "subtracts_mean", "size", "reduction", "weight_multiply", "axes", "role")
    assert {tuple(getattr(n, k) for k in same) for n in written} == {
        tuple(getattr(n, k) for k in same) for n in modules if n.role == "pre"
    }


@pytest.mark.parametrize(
    "no_norm",
    [
        lambda x, gain, offset: x * gain + offset,
        lambda x, gain, offset: x * torch.sigmoid(x) * gain,
        lambda x, gain, offset: x * torch.sigmoid(gain * x),
        lambda x, gain, offset: torch.softmax(x, -1) * gain,
        lambda x, gain, offset: x - x.mean(-1, keepdim=True),
    ],
)
def test_lookalikes_are_no_norms(no_norm: Inline) -> None:
    found = anatomy_of(*inline(no_norm))
    assert [n.path for n in found.norms if n.kind not in ("affine", "identity", "unknown")] == ["final"]
    assert {b.placement for b in only_stream(found).branches} == {"none"}


class StoredScale(nn.Module):
    """Two convolutions, and between them a scale and shift from buffers, by its own forward."""

    def __init__(self, root: bool, gain: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.root, self.gain = root, nn.Parameter(torch.rand(8)) if gain else None
        self.register_buffer("mean", torch.rand(8))
        self.register_buffer("spread", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.spread + 1e-5).rsqrt() if self.root else 1 / (self.spread + 1e-5)
        if self.gain is not None:
            scale = scale * self.gain
        return self.second((self.first(x) - self.mean[:, None, None]) * scale[:, None, None])


@pytest.mark.parametrize("gain", [False, True])
def test_a_frozen_batch_norm_is_told_by_its_stored_variance(gain: bool) -> None:
    (site,) = anatomy_of(StoredScale(True, gain).eval(), torch.randn(2, 3, 8, 8)).norms
    assert (site.path, site.kind, site.frozen, site.eps) == (f".#mul:{int(gain)}", "batchnorm", True, 1e-5)
    assert (site.subtracts_mean, site.axes) == (True, (0, 2, 3))
    assert (site.affine, site.weight) == (("weight", "gain") if gain else ("none", None))


def test_a_division_by_a_buffer_is_no_norm() -> None:
    assert anatomy_of(StoredScale(False, False).eval(), torch.randn(2, 3, 8, 8)).norms == ()


class Masked(nn.Module):
    """A norm written out, whose output is masked by numbers that come with the input before its gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * mask[..., None]
        return x + torch.relu(self.inner(h * self.gain))


def test_a_mask_is_no_part_of_a_norm() -> None:
    (site,) = anatomy_of(Masked(), (torch.randn(2, 3, WIDTH), torch.ones(2, 3))).norms
    assert (site.kind, site.affine, site.role) == ("rmsnorm", "none", "pre")
