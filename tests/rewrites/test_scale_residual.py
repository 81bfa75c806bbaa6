"""Factors on branches and trunks: the same function where the writers take them up, read back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Branch
from normprobe.rewrites import Effect, Initialise, ScaleResidual, Survey, ToPostNorm, make_plan
from normprobe.theory import deepnorm
from tests import models
from tests.rewrites.cases import applied, double, outputs, snapshot

BUILDS = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "t5": models.t5,
    "neox": lambda: models.neox(True),
    "torch": lambda: models.torch_encoder(True, True),
    "bert": models.bert,
}


def branches(model: nn.Module, inputs: Any) -> list[Branch]:
    return [branch for stream in Survey.of(model, inputs).anatomy.streams for branch in stream.branches]


@pytest.mark.parametrize("kind", ["constant", "layerscale"])
@pytest.mark.parametrize("name", BUILDS)
def test_the_writers_take_the_factor_up(name: str, kind: Any) -> None:
    model, inputs = double(BUILDS[name]())
    before, kept, many = outputs(model, inputs), snapshot(model), len(branches(model, inputs))
    plan = applied(model, inputs, ScaleResidual(kind, expect=many))
    assert plan.effect is Effect.EXACT
    assert float((outputs(model, inputs) - before).abs().max() / before.abs().max()) <= 1e-6
    kinds = {"constant": "constant", "layerscale": "channel"}
    found = branches(model, inputs)
    assert {branch.branch_scale.kind for branch in found} == {kinds[kind]}
    if kind == "constant" and name != "t5":
        assert all(branch.branch_scale.value == pytest.approx(len(found) ** -0.5) for branch in found)
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("kind", ["rezero", "skipinit"])
def test_a_learned_zero_silences_every_branch_and_gets_a_gradient(kind: Any) -> None:
    model, inputs = models.gpt2()
    plan = applied(model, inputs, ScaleResidual(kind))
    assert plan.effect is Effect.BREAKING
    with torch.no_grad():
        stream = model.transformer.wte(inputs["input_ids"]) + model.transformer.wpe.weight[: models.TOKENS]
        wanted = model.lm_head(model.transformer.ln_f(stream))
    assert torch.allclose(outputs(model, inputs), wanted, atol=1e-6)
    model(**inputs).logits.square().mean().backward()
    scales = [p for name, p in model.named_parameters() if name.endswith("branch_scale")]
    assert len(scales) == 4
    assert all(p.grad is not None and float(p.grad.abs()) > 0 for p in scales)


def test_layerscale_starts_by_depth_and_the_writers_get_what_it_takes() -> None:
    model, inputs = double(models.gpt2())
    old = model.transformer.h[1].mlp.c_proj.weight.detach().clone()
    applied(model, inputs, ScaleResidual(only="transformer.h.1"))
    block = model.transformer.h[1]
    assert torch.equal(block.mlp.branch_scale, torch.full((models.WIDTH,), 0.1, dtype=torch.float64))
    assert torch.allclose(block.mlp.c_proj.weight * 0.1, old, rtol=1e-12)
    assert not hasattr(model.transformer.h[0].mlp, "branch_scale")


def test_without_preserving_the_writers_stay() -> None:
    model, inputs = models.gpt2()
    plan = make_plan(model, [ScaleResidual("constant", preserve=False)], inputs)
    assert plan.effect is Effect.BREAKING
    assert all(not site.touched for site in plan.steps[0][1].sites)
    before = outputs(model, inputs)
    plan.apply()
    assert not torch.allclose(outputs(model, inputs), before, atol=1e-3)


def test_what_cannot_take_a_factor_up_is_refused() -> None:
    gemma, ids = models.gemma2()
    with pytest.raises(RewriteError, match="whose gain scales each channel already"):
        applied(gemma, ids, ScaleResidual())
    gpt2, inputs = models.gpt2()
    assert len(applied(gpt2, inputs, ScaleResidual("constant")).steps[0][1].sites) == 4
    with pytest.raises(RewriteError, match="constant scale already"):
        applied(gpt2, inputs, ScaleResidual())
    with pytest.raises(RewriteError, match="kind: constant"):
        ScaleResidual("half")  # type: ignore[arg-type]
    pre, x = models.torch_encoder(True, True)
    with pytest.raises(RewriteError, match="before a norm on the sum"):
        applied(pre, x, ScaleResidual("deepnorm"))


# ---- the trunk


@pytest.mark.parametrize("name", ["bert", "torch"])
def test_deepnorm_multiplies_the_trunk(name: str) -> None:
    model, inputs = models.bert() if name == "bert" else models.torch_encoder(False, False)
    kept = snapshot(model)
    plan = applied(model, inputs, ScaleResidual("deepnorm"), Initialise("deepnorm"))
    alpha = deepnorm("encoder", encoder_layers=models.LAYERS)["encoder"].alpha
    found = branches(model, inputs)
    assert {branch.placement for branch in found} == {"deepnorm"}
    assert all(branch.skip_scale == pytest.approx(alpha) for branch in found)
    plan.undo()
    assert snapshot(model) == kept


class Post(nn.Module):
    """norm(α·x + F(x)) by hand."""

    def __init__(self, layer: nn.TransformerEncoderLayer, alpha: float) -> None:
        super().__init__()
        self.layer, self.alpha = layer, alpha

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x = layer.norm1(self.alpha * x + layer._sa_block(x, None, None))
        out: Tensor = layer.norm2(self.alpha * x + layer._ff_block(x))
        return out


class Narrowed(nn.Module):
    """A post-norm branch whose trunk goes through a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.up = nn.Linear(models.WIDTH, models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)
        self.down, self.norm = nn.Linear(models.WIDTH, models.WIDTH), nn.LayerNorm(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(self.up(x).relu()) + self.shortcut(x))
        return out


def test_a_trunk_that_goes_through_a_matrix_is_refused() -> None:
    torch.manual_seed(0)
    plain = (nn.TransformerEncoderLayer(models.WIDTH, 4, 48, 0.0, batch_first=True) for _ in range(3))
    model = nn.Sequential(next(plain), Narrowed(), *plain).eval()
    plan = make_plan(model, [ScaleResidual("deepnorm", 2.0)], torch.randn(2, 6, models.WIDTH))
    assert "refused 1: its trunk passes a projection: no factor on it could be told apart from that" in str(plan)
    plan.apply()


def test_a_pre_norm_stack_becomes_deepnorm_by_its_formula() -> None:
    model, x = double(models.torch_encoder(True, True))
    alpha = deepnorm("encoder", encoder_layers=models.LAYERS)["encoder"].alpha
    wanted = nn.Sequential(*(Post(layer, alpha) for layer in models.torch_encoder(True, True)[0].double().layers))
    wanted.eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {id(p) for group in optimiser.param_groups for p in group["params"]}
    plan = applied(model, x, ToPostNorm(deepnorm=True))
    assert torch.allclose(outputs(model, x), outputs(wanted, x), atol=1e-12)
    assert {branch.placement for branch in branches(model, x)} == {"deepnorm"}
    assert {id(p) for p in model.parameters()} < before
    plan.undo()
    assert {id(p) for p in model.parameters()} == before


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "torch"])
def test_every_sum_is_normed_and_the_final_norm_is_gone(name: str) -> None:
    model, inputs = BUILDS[name]()
    kept = snapshot(model)
    plan = applied(model, inputs, ToPostNorm())
    anatomy = Survey.of(model, inputs).anatomy
    for stream in anatomy.streams:
        assert {branch.placement for branch in stream.branches} == {"post"}
        assert stream.final_norm is None
        assert all((branch.post_norm or "").rpartition(".")[2].startswith("post_") for branch in stream.branches)
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_trains_with_dropout_and_checkpointing(dropout: float) -> None:
    model, inputs = models.gpt2(resid_pdrop=dropout, embd_pdrop=0.0, attn_pdrop=0.0)
    applied(model, inputs, ToPostNorm())
    model.train()
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


def test_a_write_that_no_sum_takes_is_an_error() -> None:
    model, inputs = models.gpt2()
    applied(model, inputs, ToPostNorm())
    block = model.transformer.h[0]
    block.mlp.register_forward_hook(lambda module, args, output: output * 1.0)
    with pytest.raises(RewriteError, match="was not added as it was"):
        model(**inputs)


def test_parallel_and_post_norm_streams_are_refused() -> None:
    neox, ids = models.neox(True)
    with pytest.raises(RewriteError, match="one sum for both"):
        applied(neox, ids, ToPostNorm())
    bert, ids = models.bert()
    with pytest.raises(RewriteError, match="placed post"):
        applied(bert, ids, ToPostNorm())


def test_a_norm_over_the_stream_beside_its_entry_is_refused() -> None:
    class Beside(nn.Module):
        """Zamba's shared block: norm and attention read the stream beside the embeddings."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.read = nn.RMSNorm(2 * models.WIDTH), nn.Linear(2 * models.WIDTH, models.WIDTH)

        def forward(self, x: Tensor, entry: Tensor) -> Tensor:
            found: Tensor = x + self.read(self.norm(torch.cat([x, entry], -1)))
            return found

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.final = nn.ModuleList(Beside() for _ in range(3)), nn.RMSNorm(models.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            entry = x
            for block in self.blocks:
                x = block(x, entry)
            found: Tensor = self.final(x)
            return found

    torch.manual_seed(0)
    with pytest.raises(RewriteError, match=r"norms another shape than the sum's \(2, 5, 32\): \(2, 5, 64\)"):
        applied(Stack(), torch.randn(2, 5, models.WIDTH), ToPostNorm())


def test_layers_lie_over_each_other() -> None:
    """One module that is scaled twice by hand and followed to its sum: each layer acts, once."""
    model, x = double(models.torch_encoder(True, True))
    applied(model, x, ScaleResidual("layerscale", 0.5, preserve=False))
    applied(model, x, ToPostNorm())
    assert {branch.placement for branch in branches(model, x)} == {"post"}
    wanted = nn.Sequential(*(Post(layer, 1.0) for layer in models.torch_encoder(True, True)[0].double().layers)).eval()
    for post in wanted:
        for weight in (post.layer.self_attn.out_proj, post.layer.linear2):
            weight.weight.data *= 0.5
            weight.bias.data *= 0.5
    assert torch.allclose(outputs(model, x), outputs(wanted, x), atol=1e-12)
