"""NP204, NP205, NP206 and NP207: norms on the trunk and in its branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import BranchScale
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import PRE, anatomy, codes, found, judge, norm_before, replace, twin
from tests.faults.operators.placement import taken_behind


def layers(model: nn.Module, inputs: Any) -> list[str]:
    (stream,) = anatomy(model, inputs).streams
    return list(dict.fromkeys(branch.block for branch in stream.branches))


@pytest.mark.parametrize("name", PRE)
def test_np204_finds_a_norm_on_the_trunk(name: str) -> None:
    model, inputs = PRE[name]()
    block = layers(model, inputs)[1]
    (stream,) = anatomy(model, inputs).streams
    assert stream.final_norm is not None
    norm_before(model.get_submodule(block), twin(model, stream.final_norm))
    (finding,) = found("NP204", model, inputs)
    assert (finding.where, finding.severity.value) == (f"{block}.planted", "warning")
    assert f"(1 of {stream.depth} sums)" in finding.message
    assert codes(model, inputs) == {"NP204"}


@pytest.mark.parametrize("options", [{}, {"norm": models.RMSNorm}])
def test_np204_finds_skips_taken_behind_the_norm_of_every_block(options: dict[str, Any]) -> None:
    (finding,) = found("NP204", *models.decoder("trunk", **options))
    assert finding.where == "blocks"
    assert "every block takes its skip behind the norm that it begins with" in finding.message


@pytest.mark.parametrize(("kind", "norms"), [("attention", 2), ("mlp", 3)])
def test_np204_notes_skips_of_one_kind_of_branch_behind_its_norm(kind: str, norms: int) -> None:
    model, inputs = models.decoder("pre", layers=3)
    held = anatomy(model, inputs)
    for branch in held.streams[0].branches:
        if branch.kind == kind:
            taken_behind(model, branch.pre_norm or "", branch)
    (finding,) = normprobe.probe(model, inputs, level="structure").findings
    assert (finding.code, finding.severity.value, len(finding.places)) == ("NP204", "note", norms)
    assert f"the skip of the {kind} branch is taken behind the norm before it" in finding.message


@pytest.mark.parametrize("name", ["opt_post", "bert", "encoder_post", "decoder_post", "olmo2", "gpt2"])
def test_np204_is_silent_where_blocks_end_in_their_norms_or_norm_their_branches(name: str) -> None:
    assert found("NP204", *models.MODELS[name]()) == ()


def conformer(blocks: int) -> Any:
    """Blocks of two pre-norm branches that end in a norm on the sum."""
    writes = []
    for i in range(blocks):
        own = {"block": f"blocks.{i}", "placement": "post", "post_norm": f"blocks.{i}.norm_out"}
        writes += [b.branch(f"blocks.{i}"), b.branch(f"blocks.{i}", **own)]
    return b.stream(branches=tuple(writes), depth=2 * blocks, placement="mixed")


def test_np204_leaves_blocks_alone_that_all_end_in_a_norm() -> None:
    assert judge("NP204", b.document(streams=(conformer(3),))) == ((), ())
    lost = conformer(3).model_copy(update={"final_norm": None})
    assert judge("NP203", b.document(streams=(lost,))) == ((), ())


def test_np204_needs_two_blocks_to_tell_where_a_skip_is_taken() -> None:
    facts = {"block": "blocks.0", "placement": "post", "pre_norm": None, "post_norm": "blocks.0.norm"}
    one = b.stream(branches=(b.branch("blocks.0", **facts),) * 2, placement="post", final_norm=None)
    assert judge("NP204", b.document(streams=(one,))) == ((), ())


def post(depth: int, **more: Any) -> Any:
    facts = {"placement": "post", "pre_norm": None, "post_norm": "norm"} | more
    writes = tuple(b.branch(f"blocks.{i}", **facts) for i in range(depth))
    return b.stream(branches=writes, depth=depth, placement="post", final_norm=None, needs_final_norm=False)


def test_np205_starts_behind_its_limit() -> None:
    assert judge("NP205", b.document(streams=(post(48),))) == ((), ())
    (finding,), _ = judge("NP205", b.document(streams=(post(49),)))
    assert (finding.value, finding.limit, finding.severity.value) == (49.0, 48.0, "warning")


@pytest.mark.parametrize(
    "scaled",
    [{"skip_scale": 2.0}, {"skip_scale": None}, {"branch_scale": BranchScale(kind="channel")}, {"skip": "gate"}],
)
def test_np205_is_silent_where_something_is_scaled(scaled: dict[str, Any]) -> None:
    assert judge("NP205", b.document(streams=(post(99, **scaled),))) == ((), ())


@pytest.mark.parametrize(("trained", "severity"), [(True, "note"), (False, "warning"), (None, "warning")])
def test_np205_is_a_note_for_a_trained_model(trained: bool | None, severity: str) -> None:
    init = b.init(trained=trained)
    (finding,), _ = judge("NP205", b.document(streams=(post(49),), init=init))
    assert (finding.severity.value, "look trained" in finding.message) == (severity, trained is True)


@pytest.mark.parametrize("name", ["bert", "encoder_post", "decoder_post", "opt_post"])
def test_np205_reads_the_depth_of_real_stacks(name: str) -> None:
    """Every post-norm model is deep once the limit is below its depth, and none is now."""
    data = normprobe.probe(*models.MODELS[name](), level="structure").data
    assert judge("NP205", data) == ((), ())
    shallow = type(normprobe.checks.find("NP205"))(max_writes=3.0)  # type: ignore[call-arg]
    (finding,) = shallow.run(data)
    assert "each sum normed as a whole" in finding.message  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "by hand"])
def test_np206_names_the_branch_that_reads_the_stream_raw(name: str) -> None:
    model, inputs = PRE[name]() if name == "by hand" else deeper(name)
    (stream,) = anatomy(model, inputs).streams
    branch = stream.branches[3]
    assert branch.pre_norm is not None
    replace(model, branch.pre_norm, nn.Identity())
    (finding,) = found("NP206", model, inputs)
    assert (finding.where, finding.value, finding.severity.value) == (branch.block, "none", "warning")
    assert "placement none of the mlp branch, where 2 of its 2 counterparts" in finding.message


def deeper(name: str) -> models.Built:
    field = {"gpt2": "n_layer"}.get(name, "num_hidden_layers")
    small = dict(models.SMALL)
    models.SMALL["num_hidden_layers"] = 3
    try:
        if name == "gpt2":
            fields = {"n_positions": 32, "n_embd": models.WIDTH, "n_head": models.HEADS, field: 3}
            tokens = {"vocab_size": models.VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
            return models.hugging_face("GPT2LMHeadModel", "GPT2Config", **fields, **tokens)
        return models.MODELS[name]()
    finally:
        models.SMALL.update(small)


def test_np206_compares_equal_places_of_equal_blocks_only() -> None:
    """Attention blocks normed behind, state space blocks before: a hybrid recipe, and nothing odd."""
    kinds = ["ssm", "ssm", "ssm", "attention"] * 2
    writes = [
        b.branch(f"blocks.{i}", kind=kind, placement="output" if kind == "attention" else "pre")
        for i, kind in enumerate(kinds)
    ]
    hybrid = b.stream(branches=tuple(writes), depth=8, placement="mixed")
    assert judge("NP206", b.document(streams=(hybrid,))) == ((), ())
    writes[4] = b.branch("blocks.4", kind="ssm", placement="none")
    (finding,), _ = judge("NP206", b.document(streams=(b.stream(branches=tuple(writes), depth=8),)))
    assert finding.where == "blocks.4"


def test_np206_says_nothing_of_halves_and_of_the_first_branch_behind_an_entry_norm() -> None:
    half = [b.branch(f"blocks.{i}", placement="pre" if i < 2 else "output") for i in range(4)]
    assert judge("NP206", b.document(streams=(b.stream(branches=tuple(half)),))) == ((), ())
    first = [b.branch(f"blocks.{i}", placement="pre" if i else "none") for i in range(4)]
    entered = b.stream(branches=tuple(first), entry_norm="embedding_norm")
    assert judge("NP206", b.document(streams=(entered,))) == ((), ())
    (finding,), _ = judge("NP206", b.document(streams=(entered.model_copy(update={"entry_norm": None}),)))
    assert finding.where == "blocks.0"


@pytest.mark.parametrize("name", PRE)
def test_np207_finds_two_norms_in_a_row_before_a_branch(name: str) -> None:
    model, inputs = PRE[name]()
    (stream,) = anatomy(model, inputs).streams
    path = stream.branches[1].pre_norm
    assert path is not None
    replace(model, path, nn.Sequential(model.get_submodule(path), twin(model, path)))
    (finding,) = found("NP207", model, inputs)
    assert (finding.where, finding.value) == (f"{path}.1", f"{path}.0")
    assert codes(model, inputs) == {"NP207"}


class Between(nn.Module):
    """Two norms with something between them."""

    def __init__(self, what: str, norm: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.what, self.norm, self.second = what, norm, second
        self.weight = nn.Parameter(torch.rand(models.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.what == "constant":
            return self.second(2.0 * y)
        if self.what == "gain":
            return self.second(y * self.weight)
        if self.what == "offset":
            return self.second(y + self.weight)
        if self.what == "act":
            return self.second(torch.relu(y))
        if self.what == "read":
            return self.second(y) + torch.relu(y)
        return self.second(y.view(*y.shape[:-1], 2, -1)).view(y.shape)  # heads


@pytest.mark.parametrize(
    ("what", "twice"),
    [("constant", True), ("gain", False), ("offset", False), ("act", False), ("read", False), ("heads", False)],
)
def test_np207_asks_for_nothing_between_and_no_other_reader(what: str, twice: bool) -> None:
    model, inputs = models.decoder("pre")
    path = "blocks.1.think.norm"
    second = nn.LayerNorm(models.WIDTH // 2 if what == "heads" else models.WIDTH)
    replace(model, path, Between(what, model.get_submodule(path), second))
    assert [f.where for f in found("NP207", model, inputs)] == ([f"{path}.second"] if twice else [])


def test_np207_does_not_report_unit_length_behind_a_norm() -> None:
    model, inputs = models.torch_encoder(norm_first=True, final=True)

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(self.encoder(x)[:, 0], dim=-1)

    assert codes(Embedder(), inputs) == set()


def test_np204_knows_the_final_norm_of_two_blocks_by_where_it_lies() -> None:
    """`blocks.1` begins with a norm on the trunk, and the norm behind all blocks reads the last sum."""

    def two(last: str) -> Any:
        norms = [None, "blocks.1.planted", None, last]
        writes = [
            b.branch(f"blocks.{i // 2}", placement="post" if norm else "pre", post_norm=norm)
            for i, norm in enumerate(norms)
        ]
        facts = {"depth": 4, "placement": "mixed", "final_norm": None, "needs_final_norm": False}
        return b.document(streams=(b.stream(branches=tuple(writes), **facts),))

    (finding,), _ = judge("NP204", two("final"))
    assert finding.where == "blocks.1.planted"
    assert judge("NP204", two("blocks.1.norm_out")) == ((), ())


def test_np206_counts_a_first_branch_that_is_normed_behind_an_entry_norm() -> None:
    places = ["pre", "output", "pre"]
    writes = tuple(b.branch(f"blocks.{i}", placement=place) for i, place in enumerate(places))
    (finding,), _ = judge("NP206", b.document(streams=(b.stream(branches=writes, entry_norm="embedding_norm"),)))
    assert finding.where == "blocks.1"


def test_np203_says_where_it_cannot_decide() -> None:
    places = [("blocks.0", "pre"), ("blocks.1", "post"), ("blocks.2", "pre")]
    writes = tuple(
        b.branch(block, placement=place, post_norm="blocks.2.planted" if place == "post" else None)
        for block, place in places
    )
    facts = {"final_norm": None, "needs_final_norm": None, "final_norm_reason": "read by a head first"}
    found, (skipped,) = judge("NP203", b.document(streams=(b.stream(branches=writes, **facts),)))
    assert found == ()
    assert skipped.why.endswith("read by a head first")


class Rounds(nn.Module):
    """Blocks that run several times, each round from what the one before gave and the tokens; a norm ends each."""

    def __init__(self, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = last
        self.embedding, self.join = nn.Embedding(32, models.WIDTH), nn.Linear(2 * models.WIDTH, models.WIDTH)
        self.core = nn.ModuleList(models.Block(models.layer_norm, "pre") for _ in range(2))
        self.coda = nn.ModuleList(models.Block(models.layer_norm, "pre") for _ in range(2))
        self.norm, self.final = nn.LayerNorm(models.WIDTH), nn.LayerNorm(models.WIDTH)
        self.head = nn.Linear(models.WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        state = torch.full_like(x, 0.1)
        for number in range(3):
            state = self.join(torch.cat([state, x], -1))
            for block in self.core:
                state = block(state)
            state = self.norm(state) if number >= self.last else state
        for block in self.coda:
            state = block(state)
        return self.head(self.final(state))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("last", "count"), [(0, 0), (2, 1)])
def test_a_norm_that_ends_every_round_is_none_on_the_trunk(last: int, count: int) -> None:
    assert len(found("NP204", Rounds(last).eval(), torch.arange(2, 14)[None])) == count
