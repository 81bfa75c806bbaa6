"""NP206 and NP213: norms that one branch lacks and its counterparts have, on sums and inside branches."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from normprobe.records import Anatomy, BranchScale, HeadRows, QKNorm, Stream
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import anatomy, found, judge, replace
from tests.faults.architectures import BUILDS, transformer
from tests.models import SMALL

DEEPSEEK = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}


def deepseek() -> models.Built:
    return transformer("DeepseekV3ForCausalLM", "DeepseekV3Config", **SMALL | DEEPSEEK)


def bart() -> models.Built:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 3), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    return transformer("BartForConditionalGeneration", "BartConfig", vocab_size=64, d_model=16, **sizes, **heads)


def bert(layers: int) -> models.Built:
    return transformer("BertForMaskedLM", "BertConfig", **SMALL | {"num_hidden_layers": layers})


def without(built: models.Built, *paths: str) -> models.Built:
    for path in paths:
        replace(built[0], path, nn.Identity())
    return built


@pytest.mark.parametrize(
    ("build", "norm", "block"),
    [
        (lambda: bert(3), "bert.encoder.layer.1.output.LayerNorm", "bert.encoder.layer.1"),
        (lambda: bert(3), "bert.encoder.layer.0.attention.output.LayerNorm", "bert.encoder.layer.0"),
        (lambda: bert(3), "bert.encoder.layer.2.output.LayerNorm", "bert.encoder.layer.2"),
        (lambda: bert(2), "bert.encoder.layer.1.output.LayerNorm", "bert.encoder.layer.1"),
        (lambda: bert(2), "bert.encoder.layer.0.output.LayerNorm", "bert.encoder.layer.0"),
        (bart, "model.decoder.layers.1.encoder_attn_layer_norm", "model.decoder.layers.1"),
        (bart, "model.encoder.layers.2.final_layer_norm", "model.encoder.layers.2"),
    ],
)
def test_one_raw_sum_of_a_post_norm_stack_is_a_warning(build: Any, norm: str, block: str) -> None:
    assert found("NP206", *build()) == ()
    (finding,) = found("NP206", *without(build(), norm))
    assert (finding.where, finding.value, finding.severity.value) == (block, "none", "warning")
    assert finding.message.endswith("have post")


@pytest.mark.parametrize("norm", ["attention.output.LayerNorm", "output.LayerNorm"])
def test_sums_that_are_raw_in_every_block_are_np213(norm: str) -> None:
    paths = [f"bert.encoder.layer.{i}.{norm}" for i in range(3)]
    built = without(bert(3), *paths)
    assert found("NP206", *built) == ()
    (finding,) = found("NP213", *built)
    assert (finding.severity.value, len(finding.places)) == ("warning", 3)
    assert finding.message.endswith("has one (placement post)")


Q = HeadRows(parameter="blocks.1.q.weight", heads=(((0, 4),),))
K = HeadRows(parameter="blocks.1.k.weight", heads=(((0, 4),),))


@pytest.mark.parametrize("name", ["gemma3", "cohere"])
def test_queries_and_keys_normed_in_all_layers_but_one_are_a_warning(name: str) -> None:
    whole = anatomy(*BUILDS[name]())
    (stream,) = whole.streams
    attention = [branch for branch in stream.branches if branch.kind == "attention"]
    assert [len(branch.inner_norms) for branch in attention] == [2, 2, 2]
    assert found("NP206", *BUILDS[name]()) == ()
    (finding,) = found("NP206", *without(BUILDS[name](), *attention[1].inner_norms))
    assert (finding.where, finding.value, finding.severity.value) == (attention[1].block, 0.0, "warning")
    assert " and ".join(attention[0].inner_norms) in finding.message


def test_one_of_them_alone_is_np209() -> None:
    (stream,) = anatomy(*BUILDS["gemma3"]()).streams
    built = without(BUILDS["gemma3"](), stream.branches[0].inner_norms[0])
    assert found("NP206", *built) == ()
    assert len(found("NP209", *built)) == 1


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("norm", ["q_a_layernorm", "kv_a_layernorm"])
def test_the_norm_of_a_latent_that_one_layer_lacks_is_found_whatever_stands_beside_it(layer: int, norm: str) -> None:
    """The first block is dense and the others are sparse; their attention is the same."""
    assert found("NP206", *deepseek()) == ()
    (finding,) = found("NP206", *without(deepseek(), f"model.layers.{layer}.self_attn.{norm}"))
    assert (finding.where, finding.value) == (f"model.layers.{layer}", 1.0)
    assert "3 of its 3 counterparts" in finding.message


def test_layers_without_rotary_embedding_may_have_other_norms() -> None:
    """Llama 4 norms queries and keys of the layers with rotary embedding alone: the fourth layer has neither."""
    sizes = SMALL | {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
        "num_key_value_heads": 4,
    }
    sizes |= {"head_dim": 8}
    built = transformer("Llama4ForCausalLM", "Llama4TextConfig", **sizes, use_qk_norm=True)
    (stream,) = anatomy(*built).streams
    assert [len(b.inner_norms) for b in stream.branches if b.kind == "attention"] == [1, 1, 1, 0]
    assert found("NP206", *built) == ()


def inside(*counts: int, recipes: tuple[int | None, ...] | None = None, **more: Any) -> Stream:
    numbers = recipes or (0,) * len(counts)
    writes = tuple(
        b.branch(f"blocks.{i}", inner_norms=tuple(f"blocks.{i}.n{k}" for k in range(n)), recipe=recipe, **more)
        for i, (n, recipe) in enumerate(zip(counts, numbers, strict=True))
    )
    return b.stream(branches=writes, depth=len(writes))


@pytest.mark.parametrize(
    ("stream", "severity"),
    [
        (inside(2, 0, 2), "warning"),
        (inside(3, 2, 3, 3), "warning"),
        (inside(2, 0, 2, 2, 0), "note"),
        (inside(2, 0), None),
        (inside(2, 0, 2, 0), None),
        (inside(0, 2, 0), None),
        (inside(2, 0, 2, recipes=(0, 1, 0)), None),
        (inside(2, 0, 2, recipes=(None, None, None)), None),
    ],
)
def test_inner_norms_are_compared_among_branches_with_the_same_operations(stream: Stream, severity: str | None) -> None:
    found, skipped = judge("NP206", b.document(streams=(stream,)))
    assert [one.severity.value for one in found] == ([] if severity is None else [severity])
    assert skipped == ()


def test_many_inner_norms_are_counted() -> None:
    (finding,), _ = judge("NP206", b.document(streams=(inside(4, 0, 4),)))
    assert finding.message.endswith("have 4 (blocks.0.n0, blocks.0.n1 and 2 more)")


def test_a_lopsided_site_in_a_branch_is_left_to_np209() -> None:
    stream = inside(2, 1, 2, parameters=("blocks.1.q.weight",))
    half = QKNorm(kind="rmsnorm", axis="head", query="blocks.1.n0")
    site = b.site(qk_norm=half, columns={"q": Q, "k": K})
    assert judge("NP206", b.document(streams=(stream,), attention=(site,))) == ((), ())


def placed(*places: str, blocks: int = 2, **last: Any) -> Anatomy:
    """Writes with their norms at these places, in equal blocks."""
    each = len(places) // blocks
    writes = [b.branch(f"blocks.{i // each}", placement=place) for i, place in enumerate(places)]
    writes[-1] = writes[-1].model_copy(update=last)
    return b.document(streams=(b.stream(branches=tuple(writes), depth=len(writes)),))


@pytest.mark.parametrize(
    ("document", "severity"),
    [
        (placed("pre", "pre", "pre", "none"), "warning"),
        (placed("none", "pre", "pre", "pre"), "warning"),
        (placed("post", "post", "none", "post"), "warning"),
        (placed("pre", "none"), None),
        (placed("none", "pre", "pre", "none"), None),
        (placed("pre", "pre", "pre", "unknown"), None),
        (placed("pre", "pre", "pre", "none", kind="other"), None),
        (placed("pre", "pre", "pre", "none", branch_scale=BranchScale(kind="channel")), None),
        (placed("pre", "pre", "none", blocks=3, branch_scale=BranchScale(kind="channel")), "note"),
        (placed("pre", "pre", "none", blocks=3), "warning"),
        (placed("pre", "pre", "pre", "none", "none", blocks=5), "note"),
        (placed("post", "post", "pre", blocks=3), "note"),
        (placed("pre", "pre", "post", blocks=3), None),
    ],
)
def test_one_raw_branch_is_a_warning_and_other_differences_are_notes(document: Any, severity: str | None) -> None:
    found, _ = judge("NP206", document)
    assert [one.severity.value for one in found] == ([] if severity is None else [severity])


def test_a_post_norm_stack_needs_its_first_norm_also_behind_an_entry_norm() -> None:
    writes = tuple(b.branch(f"blocks.{i}", placement="post" if i else "none") for i in range(3))
    (finding,), _ = judge("NP206", b.document(streams=(b.stream(branches=writes, entry_norm="embedding_norm"),)))
    assert (finding.where, finding.severity.value) == ("blocks.0", "warning")


def test_nothing_norms_the_last_sum_where_each_block_norms_the_one_before() -> None:
    def behind(block: int) -> Stream:
        places = [("post", f"blocks.{i + block}.norm") for i in range(3)]
        writes = [b.branch(f"blocks.{i}", placement=p, post_norm=n) for i, (p, n) in enumerate(places)]
        return b.stream(branches=(*writes, b.branch("blocks.3", placement="none")), depth=4)

    assert judge("NP206", b.document(streams=(behind(1),))) == ((), ())
    (finding,), _ = judge("NP206", b.document(streams=(behind(0),)))
    assert finding.where == "blocks.3"


@pytest.mark.parametrize(("beside", "severity"), [(True, "warning"), (False, "note")])
def test_a_norm_inside_stands_in_for_a_lost_one_only_where_the_counterparts_have_none(
    beside: bool, severity: str
) -> None:
    """Mamba 2 norms before its writer as well as at its input: that is no reason to lack the latter in one layer."""
    branches = tuple(
        b.branch(
            f"blocks.{i}",
            kind="ssm",
            placement="none" if i == 1 else "pre",
            pre_norm=None if i == 1 else f"blocks.{i}.norm",
            normed_inside=i == 1 or beside,
        )
        for i in range(4)
    )
    (finding,), _ = judge("NP206", b.document(streams=(b.stream(branches=branches, depth=4),)))
    assert (finding.where, finding.severity.value) == ("blocks.1", severity)
