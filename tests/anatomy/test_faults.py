"""Placement, scales and planted faults on a decoder written by hand."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import normprobe
from normprobe.records import Anatomy, Stream
from tests.anatomy.reading import anatomy_of, only_stream
from tests.models import WIDTH, Built, Decoder, RMSNorm, decoder, gpt2, ids, layer_norm, llama, shuffled, torch_encoder


def findings(built: Built) -> set[str]:
    return {f.code for f in normprobe.probe(*built, level="structure").findings}


def stream_of(built: Built) -> Stream:
    return only_stream(anatomy_of(*built))


def roles(anatomy: Anatomy) -> dict[str, str]:
    return {n.path: n.role for n in anatomy.norms}


# ---- placement


@pytest.mark.parametrize("placement", ["pre", "post", "output", "sandwich"])
@pytest.mark.parametrize("norm", [layer_norm, RMSNorm])
def test_placement_is_read_off_the_data_flow(placement: str, norm: type[nn.Module]) -> None:
    stream = stream_of(decoder(placement, final=placement != "post", norm=norm))
    assert {b.placement for b in stream.branches} == {placement}
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * 3
    assert [b.block for b in stream.branches] == [f"blocks.{i}" for i in (0, 0, 1, 1, 2, 2)]


def test_same_modules_in_another_order_are_another_placement() -> None:
    """Nothing differs between the two but the forward."""
    pre, post = decoder("pre", final=False)[0], decoder("post", final=False)[0]
    assert [n for n, _ in pre.named_modules()] == [n for n, _ in post.named_modules()]
    assert stream_of((pre, ids())).placement == "pre"
    assert stream_of((post, ids())).placement == "post"


def test_skip_taken_behind_the_norm_is_post_norm() -> None:
    """x = h + f(h), h = norm(x): the norm is on the trunk, every sum is read through it alone."""
    model, inputs = decoder("trunk")
    found = anatomy_of(model, inputs)
    assert only_stream(found).placement == "post"
    assert only_stream(found).final_norm == "final"
    assert roles(found)["final"] == "final"


class NormedBetween(nn.Module):
    """A block of a pre-norm stream, its output normed on the trunk."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.norm = block, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))


def test_norm_moved_onto_the_trunk_is_seen() -> None:
    model, inputs = decoder("pre")
    model.blocks[1] = shuffled(NormedBetween(model.blocks[1]))
    found = anatomy_of(model, inputs)
    branches = only_stream(found).branches
    assert [b.placement for b in branches] == ["pre", "pre", "pre", "post", "pre", "pre"]
    assert branches[3].post_norm == "blocks.1.norm"
    assert only_stream(found).placement == "mixed"
    assert roles(found)["blocks.1.norm"] == "post"


class ParallelBlock(nn.Module):
    def __init__(self, sublayers: nn.Module, together: bool) -> None:
        super().__init__()
        self.mix, self.think, self.together = sublayers.mix, sublayers.think, together

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.mix.branch(self.mix.norm(x)), self.think.branch(self.think.norm(x))
        return x + (a + b) if self.together else x + a + b


@pytest.mark.parametrize("together", [True, False])
def test_parallel_branches(together: bool) -> None:
    model, inputs = decoder("pre")
    model.blocks = nn.ModuleList(ParallelBlock(block, together) for block in model.blocks)
    stream = stream_of((model, inputs))
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * 3
    assert all(b.parallel and b.placement == "pre" for b in stream.branches)
    assert not stream_of(decoder("pre")).parallel


# ---- final norm


@pytest.mark.parametrize("placement", ["pre", "sandwich", "output"])
def test_dropped_final_norm_is_found_missing(placement: str) -> None:
    stream = stream_of(decoder(placement, final=False))
    assert (stream.final_norm, stream.needs_final_norm) == (None, True)
    assert "head" in stream.final_norm_reason
    assert "NP201" in findings(decoder(placement, final=False))
    assert "NP201" not in findings(decoder(placement))


@pytest.mark.parametrize(("build", "path"), [(gpt2, "transformer.ln_f"), (llama, "model.norm")])
def test_final_norm_dropped_from_a_known_architecture(build: object, path: str) -> None:
    model, inputs = build()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity())
    stream = stream_of((model, inputs))
    assert (stream.final_norm, stream.needs_final_norm) == (None, True)
    assert "NP201" in findings((model, inputs))


@pytest.mark.parametrize(
    "built",
    [
        lambda: decoder("post", final=False),
        lambda: decoder("post", final=False, norm=RMSNorm),
        lambda: decoder("post", final=False, skip=2.0),
        lambda: torch_encoder(False, False),
    ],
)
def test_post_norm_raises_nothing(built: object) -> None:
    stream = stream_of(built())
    assert (stream.final_norm, stream.needs_final_norm) == (None, False)
    assert findings(built()) == set()


class Gathering(Decoder):
    """Returns the logits and the raw stream."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.final(x)), "raw": x}


def test_other_readers_of_the_raw_stream_do_not_count_as_missing_norm() -> None:
    model, inputs = decoder("pre")
    model.__class__ = Gathering
    stream = stream_of((model, inputs))
    assert (stream.final_norm, stream.needs_final_norm) == ("final", True)
    assert stream.raw_readers == ("raw",)


def test_norm_that_never_runs_is_unused() -> None:
    model, inputs = decoder("pre")
    model.spare = nn.LayerNorm(WIDTH)
    (spare,) = [n for n in anatomy_of(model, inputs).norms if n.path == "spare"]
    assert (spare.role, spare.executed, spare.executions) == ("unused", False, 0)
    assert "NP208" in findings((model, inputs))


# ---- scales


def test_constant_on_the_branch() -> None:
    scales = [b.branch_scale for b in stream_of(decoder("pre", scale=0.25)).branches]
    assert {(s.kind, s.value, s.parameter) for s in scales} == {("constant", 0.25, None)}


def test_constants_on_the_branch_multiply() -> None:
    model, inputs = decoder("output", scale=0.5)
    for block in model.blocks:
        block.mix.norm = nn.Sequential(block.mix.norm, Times(0.25))
    scale = stream_of((model, inputs)).branches[0].branch_scale
    assert (scale.kind, scale.value) == ("constant", 0.125)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_learned_scalar_of_rezero() -> None:
    model, inputs = decoder("none", scale="scalar", final=False)
    stream = stream_of((model, inputs))
    assert {b.placement for b in stream.branches} == {"none"}
    assert stream.needs_final_norm is False
    for branch in stream.branches:
        scale = branch.branch_scale
        assert (scale.kind, scale.parameter) == ("scalar", f"{branch.path}.gain")
        assert scale.value == pytest.approx(model.get_parameter(scale.parameter).item())


def test_learned_channels_of_layer_scale() -> None:
    for branch in stream_of(decoder("pre", scale="channel")).branches:
        scale = branch.branch_scale
        assert (scale.kind, scale.value, scale.parameter) == ("channel", None, f"{branch.path}.gain")
        assert set(branch.writers) == {f"{branch.path}.branch.{n}" for n in last_layer(branch.kind)}


def last_layer(kind: str) -> tuple[str, str]:
    name = "out" if kind == "attention" else "down"
    return f"{name}.weight", f"{name}.bias"


def test_deepnorm_is_post_norm_with_a_scaled_skip() -> None:
    stream = stream_of(decoder("post", final=False, skip=1.5))
    assert {b.placement for b in stream.branches} == {"deepnorm"}
    assert [b.skip_scale for b in stream.branches] == pytest.approx([1.5] * 6)


def test_scaled_skip_without_norm_on_the_sum_is_no_deepnorm() -> None:
    stream = stream_of(decoder("pre", skip=0.5))
    assert {b.placement for b in stream.branches} == {"pre"}
    assert [b.skip_scale for b in stream.branches] == pytest.approx([0.5] * 6)


def test_scaled_embedding() -> None:
    model, inputs = decoder("pre")
    model.embedding = nn.Sequential(model.embedding, Times(5.0))
    assert stream_of((model, inputs)).input_multiplier == pytest.approx(5.0)


def test_norm_on_the_embedding_is_the_entry_norm() -> None:
    model, inputs = decoder("pre")
    model.embedding = nn.Sequential(model.embedding, nn.LayerNorm(WIDTH))
    found = anatomy_of(model, inputs)
    assert only_stream(found).entry_norm == "embedding.1"
    assert roles(found)["embedding.1"] == "embedding"


def test_eps_outside_the_root() -> None:
    built = decoder("pre", norm=lambda: RMSNorm(eps=1e-3, outside=True))
    norms = anatomy_of(*built).norms
    assert {(n.kind, n.eps_placement) for n in norms} == {("rmsnorm", "outside_sqrt")}
    assert [n.eps for n in norms] == pytest.approx([1e-3] * len(norms), rel=1e-2)
    assert "NP101" in findings(built)
    assert "NP101" not in findings(decoder("pre", norm=lambda: RMSNorm(eps=1e-3)))
