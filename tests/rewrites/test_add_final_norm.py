"""The added norm against a reference by hand, at readers and producers, and refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.rewrites import AddFinalNorm, make_plan
from tests.models import (
    MODELS,
    VOCABULARY,
    WIDTH,
    Block,
    decoder,
    gpt2,
    ids,
    layer_norm,
    llama,
    olmo2,
    t5,
    torch_encoder,
)
from tests.models import RMSNorm as OwnRMSNorm


def codes(model: nn.Module, inputs: object) -> set[str]:
    return {finding.code for finding in normprobe.probe(model, inputs).findings}


def test_it_is_the_stream_s_own_norm_before_the_head() -> None:
    model, inputs = decoder("pre", final=False)
    hidden: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    model(inputs)
    assert "NP201" in codes(model, inputs)
    plan = make_plan(model, [AddFinalNorm(expect=1)], inputs).apply()
    wanted = F.layer_norm(hidden[0].double(), (WIDTH,), eps=1e-5) @ model.head.weight.double().T
    torch.testing.assert_close(model(inputs).double(), wanted, rtol=1e-5, atol=1e-5)
    anatomy = normprobe.probe(model, inputs, level="structure").anatomy
    assert anatomy.streams[0].final_norm == "head.final_norm"
    assert "NP201" not in codes(model, inputs)
    assert set(model.state_dict()) >= {"head.final_norm.weight", "head.final_norm.bias"}
    assert plan.proof is not None
    assert plan.proof.max_abs > 0
    assert "on purpose" in plan.proof.tolerance_source
    plan.undo()
    assert "NP201" in codes(model, inputs)
    assert not any("final_norm" in key for key in model.state_dict())


def test_kind_and_eps_are_those_of_the_stream() -> None:
    model, inputs = decoder("pre", final=False, norm=lambda: OwnRMSNorm(eps=3e-4))
    make_plan(model.bfloat16(), [AddFinalNorm()], inputs).apply()
    norm = normprobe.probe(model, inputs, level="structure").anatomy.norm("head.final_norm")
    assert norm is not None
    assert (norm.kind, norm.affine, norm.role) == ("rmsnorm", "weight", "final")
    assert norm.eps == pytest.approx(3e-4, rel=0.02)
    assert model.head.final_norm.weight.dtype == torch.bfloat16
    assert model.head.final_norm.weight.unique().tolist() == [1.0]


def test_where_no_module_reads_the_stream_its_block_returns_it_normed() -> None:
    model, inputs = torch_encoder(True, False)
    raw = model(inputs)
    plan = make_plan(model, [AddFinalNorm()], inputs).apply()
    torch.testing.assert_close(model(inputs), F.layer_norm(raw, (WIDTH,)), rtol=1e-4, atol=1e-5)
    assert normprobe.probe(model, inputs, level="structure").anatomy.streams[0].final_norm == "layers.1.final_norm"
    plan.undo()
    assert torch.equal(model(inputs), raw)


LOSABLE = {"llama": (llama, "model", "norm"), "gpt2": (gpt2, "transformer", "ln_f"), "olmo2": (olmo2, "model", "norm")}


@pytest.mark.parametrize("name", LOSABLE)
def test_transformers_models_that_lost_their_final_norm(name: str) -> None:
    build, holder, child = LOSABLE[name]
    model, inputs = build()
    lost = getattr(getattr(model, holder), child)
    setattr(getattr(model, holder), child, nn.Identity())
    make_plan(model, [AddFinalNorm()], inputs).apply()
    with torch.no_grad():
        model.lm_head.final_norm.load_state_dict(lost.state_dict())
        found = model(**inputs).logits
    intact, _ = build()
    torch.testing.assert_close(found, intact(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_an_encoder_read_by_many_layers_is_normed_where_the_decoder_takes_it() -> None:
    model, inputs = t5()
    model.encoder.final_layer_norm = nn.Identity()
    make_plan(model, [AddFinalNorm(expect=1)], inputs).apply()
    streams = normprobe.probe(model, inputs, level="structure").anatomy.streams
    assert [stream.final_norm for stream in streams] == ["decoder.final_norm", "decoder.final_layer_norm"]


def test_copies_and_pickles_hold_their_own_norm() -> None:
    model, inputs = decoder("pre", final=False, norm=layer_norm)
    make_plan(model, [AddFinalNorm()], inputs).apply()
    for twin in (copy.deepcopy(model.head), pickle.loads(pickle.dumps(model.head))):
        twin.final_norm.weight.data.zero_()
        twin.final_norm.bias.data.zero_()
        assert twin(torch.randn(2, WIDTH)).abs().max() == 0
    assert model(inputs).abs().max() > 0


@pytest.mark.filterwarnings("ignore")
def test_compiled_in_one_graph() -> None:
    model, inputs = decoder("pre", final=False, layers=1)
    make_plan(model, [AddFinalNorm()], inputs).apply()
    head, x = model.head, torch.randn(2, WIDTH)
    assert torch.equal(torch.compile(head, fullgraph=True, backend="eager")(x), head(x))


@pytest.mark.parametrize("name", ["decoder_pre", "decoder_post", "llama", "encoder_pre_final", "olmo2"])
def test_a_model_that_needs_none_gets_none(name: str) -> None:
    model, inputs = MODELS[name]()
    with pytest.raises(RewriteError, match="AddFinalNorm would change nothing"):
        make_plan(model, [AddFinalNorm()], inputs).apply()


class Open(nn.Module):
    """The stream is written and read in one forward, by a weight without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.read = layer_norm(), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.read2 = layer_norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.read(self.norm(x))
        x = x + self.read2(self.norm2(x))
        return x @ self.embedding.weight.T


def refusal(model: nn.Module, inputs: object, rewrite: AddFinalNorm | None = None) -> str:
    (found,) = make_plan(model, [rewrite or AddFinalNorm()], inputs).steps[0][1].refused
    return found.why


def test_refusals() -> None:
    assert "no module boundary" in refusal(Open(), ids())
    outside, inputs = decoder("pre", final=False, norm=lambda: OwnRMSNorm(outside=True))
    assert "eps outside_sqrt, not inside the root; pass eps=" in refusal(outside, inputs)
    make_plan(outside, [AddFinalNorm(eps=1e-5)], inputs).apply()
    model, inputs = decoder("pre", final=False)
    model.head.final_norm = nn.Identity()
    assert "has a child final_norm already" in refusal(model, inputs)
    with pytest.raises(RewriteError, match=r"kind: same \| layernorm \| rmsnorm\n  found: 'batchnorm'"):
        AddFinalNorm(kind="batchnorm")  # type: ignore[arg-type]
    with pytest.raises(RewriteError, match="0 < eps < 1"):
        AddFinalNorm(eps=-1.0)


class Bypassed(nn.Module):
    """Two modules read the last sum on the way to the output; a norm before either alone would be half a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(layer_norm, "pre") for _ in range(2))
        self.left, self.right = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.left(x) * self.right(x)


def test_two_readers_are_served_at_the_block_that_they_read_from() -> None:
    model = Bypassed()
    plan = make_plan(model, [AddFinalNorm()], ids())
    (site,) = plan.steps[0][1].sites
    assert site.path == "blocks.1"
    plan.apply()
    assert normprobe.probe(model, ids(), level="structure").anatomy.streams[0].final_norm == "blocks.1.final_norm"
