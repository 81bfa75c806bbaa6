"""Readers, writers and head rows held against the model itself: what they name is what moves the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import normprobe
from normprobe.records import AttentionSite, Branch, HeadRows
from tests.anatomy.reading import anatomy_of
from tests.models import (
    HEADS,
    HIDDEN,
    LAYERS,
    MODELS,
    SMALL,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Built,
    bloom,
    gemma2,
    gpt2,
    hugging_face,
    llama,
    neox,
    shuffled,
    t5,
    torch_encoder,
)

# ---- readers and writers


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return (out if isinstance(out, Tensor) else out[0]).clone()


@contextmanager
def restored(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(kept[name])


@torch.no_grad()
def noise(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    for name in names:
        p = parameters[name]
        p.add_(torch.randn(p.shape, generator=generator))


@torch.no_grad()
def silence(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    for name in names:
        parameters[name].zero_()


def moves(model: nn.Module, inputs: Any, parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> bool:
    before = outputs(model, inputs)
    noise(parameters, names)
    return not torch.equal(before, outputs(model, inputs))


def fault(model: nn.Module, inputs: Any, branch: Branch) -> str | None:
    """What is wrong with the readers and writers of a branch, None if they hold."""
    parameters = dict(model.named_parameters())
    with restored(parameters):
        if not moves(model, inputs, parameters, branch.readers):
            return "the readers do not move the output"
    for reader in branch.readers:
        with restored(parameters):
            silence(parameters, branch.writers)
            if moves(model, inputs, parameters, (reader,)):
                return f"{reader} moves the output though the writers are zero"
    for writer in branch.writers:
        with restored(parameters):
            if not moves(model, inputs, parameters, (writer,)):
                return f"{writer} does not move the output"
    return None


@pytest.mark.parametrize("name", MODELS)
def test_readers_act_through_writers_alone(name: str) -> None:
    model, inputs = MODELS[name]()
    found = anatomy_of(model, inputs)
    branches = [b for stream in found.streams for b in (stream.branches[0], *stream.branches[-2:])]
    assert {b.path: fault(model, inputs, b) for b in branches} == {b.path: None for b in branches}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_readers_reads_the_norm_before_a_branch(name: str) -> None:
    model, inputs = MODELS[name]()
    found, parameters = anatomy_of(model, inputs), dict(model.named_parameters())
    branches = [b for stream in found.streams for b in stream.branches[:3] if b.pre_norm]
    for branch in branches:
        norm = found.norm(branch.pre_norm)
        gains = tuple(n for n in (norm.weight, norm.bias) if n)
        with restored(parameters):
            assert moves(model, inputs, parameters, gains)
        with restored(parameters):
            silence(parameters, branch.readers)
            assert not moves(model, inputs, parameters, gains), branch.path


def test_wrong_readers_or_writers_would_be_seen() -> None:
    model, inputs = gpt2()
    attention, mlp, *_ = anatomy_of(model, inputs).streams[0].branches
    swapped = attention.model_copy(update={"writers": mlp.writers})
    assert "though the writers are zero" in str(fault(model, inputs, swapped))
    halved = attention.model_copy(update={"writers": attention.writers[:1]})
    assert "though the writers are zero" in str(fault(model, inputs, halved))


# ---- head rows


def rows(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def moved(found: HeadRows, order: list[int]) -> tuple[list[int], list[int]]:
    """Rows to write and rows to take them from, where head `i` gets what head `order[i]` had."""
    targets = [r for head in found.heads for r in rows(head)]
    return targets, [r for i in order for r in rows(found.heads[i])]


@torch.no_grad()
def put(tensor: Tensor, axis: int, targets: list[int], sources: list[int]) -> None:
    taken = tensor.index_select(axis, torch.tensor(sources)).clone()
    tensor.index_copy_(axis, torch.tensor(targets), taken)


def permute_rows(model: nn.Module, found: HeadRows, order: list[int]) -> None:
    targets, sources = moved(found, order)
    put(model.get_parameter(found.parameter), found.axis, targets, sources)
    bias = dict(model.named_parameters()).get(found.parameter.removesuffix("weight") + "bias")
    if bias is not None:
        put(bias, 0, targets, sources)


def permute_output(model: nn.Module, weight: str, axis: int, order: list[int], head_dim: int) -> None:
    sources = [head * head_dim + d for head in order for d in range(head_dim)]
    put(model.get_parameter(weight), axis, list(range(len(sources))), sources)


def permute_heads(model: nn.Module, site: AttentionSite, output: str) -> None:
    """Reverse the groups of heads that share a key, and the heads within each."""
    share = site.heads // site.kv_heads
    groups = list(reversed(range(site.kv_heads)))
    queries = [g * share + h for g in groups for h in reversed(range(share))]
    permute_rows(model, site.columns["q"], queries)
    for name in ("k", "v"):
        found = site.columns[name]
        permute_rows(model, found.model_copy(update={"heads": tuple(dict.fromkeys(found.heads))}), groups)
    axis = 1 - site.columns["q"].axis  # a Linear holds (out, in), GPT-2's Conv1D (in, out)
    permute_output(model, output, axis, queries, site.head_dim)


def without_alibi() -> tuple[nn.Module, Any]:
    """BLOOM without the bias that tells its heads apart."""
    model, inputs = bloom()
    bias = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *args, **kwargs: torch.zeros_like(bias(*args, **kwargs))
    return model, inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}  # with a mask it asks the method


def small(model_class: str, config_class: str, **fields: Any) -> Built:
    """A model of transformers without what tells its heads apart besides the projections."""
    model, inputs = hugging_face(model_class, config_class, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("relative_attention_bias", "sinks", "q_norm", "k_norm")):
                parameter.fill_(0.5)
    return model, inputs


def audio() -> Built:
    small = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
    small |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_mel_bins": 8}
    small |= {"max_source_positions": 10, "max_target_positions": 10, "decoder_start_token_id": 1}
    model, inputs = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **small, **BETWEEN)
    return model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": inputs["input_ids"]}


def vision(model_class: str, config_class: str, **fields: Any) -> Built:
    model, _ = small(model_class, config_class, image_size=8, patch_size=2, **fields)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8)}


class ChosenBiases(nn.Module):
    """Experts in one product over sorted tokens, with the bias of each token's expert picked by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3) for _ in range(2))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(4, WIDTH) * 0.3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weights, experts = self.router(h).softmax(-1).topk(2)
        chosen = experts.flatten()
        h = h.repeat_interleave(2, 0)[:, None]
        h = torch.relu((h @ self.up[chosen])[:, 0] + self.up_bias[chosen])
        h = (h[:, None] @ self.down[chosen])[:, 0] + self.down_bias[chosen]
        return x + (h * weights.flatten()[:, None]).view(-1, 2, WIDTH).sum(1).view(x.shape)


def test_biases_that_a_router_picks_are_biases() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ChosenBiases(), ChosenBiases(), nn.LayerNorm(WIDTH)), torch.randn(2, 4, WIDTH)
    (stream,) = anatomy_of(model, x).streams
    assert [b.kind for b in stream.branches] == ["moe", "moe"]
    assert stream.branches[0].writers == ("0.down", "0.down_bias")
    assert stream.branches[0].readers == ("0.router.weight", "0.up", "0.up_bias")
    assert [fault(model, x, branch) for branch in stream.branches] == [None, None]


class Layout(nn.Module):
    """Attention of a packed weight that holds q, k and v in an order of its own; `split` gives each as [B, H, T, D]."""

    def __init__(
        self, split: Callable[[Tensor], tuple[Tensor, ...]], width: int = 3 * WIDTH, norm: bool = False
    ) -> None:
        super().__init__()
        self.split, self.qkv, self.out = split, nn.Linear(WIDTH, width), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH // HEADS) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, enable_gqa=q.shape[1] != k.shape[1])
        return x + self.out(y.transpose(1, 2).flatten(2))


def layout(*arguments: Any, **fields: Any) -> Callable[[], Built]:
    return lambda: (shuffled(Layout(*arguments, **fields)), torch.randn(2, TOKENS, WIDTH))


def by_kind(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def by_head(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0)


def by_dimension(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(-1, (-1, HEADS, 3)).permute(4, 0, 2, 1, 3).unbind(0)


def by_group(packed: Tensor) -> tuple[Tensor, ...]:
    grouped = packed.unflatten(-1, (2, 4, -1))
    q, k, v = grouped.split((2, 1, 1), dim=3)
    return tuple(x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))


def einsum_heads() -> Built:
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
            return x + self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))

    return shuffled(Einsum()), torch.randn(2, TOKENS, WIDTH)


def folded_queries() -> Built:
    """One key for all heads, whose queries lie among the tokens."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, (k, v) = self.q(x).view(len(x), -1, 8), self.kv(x).split(8, dim=-1)
            return x + self.out(((q @ k.mT).softmax(-1) @ v).reshape(x.shape))

    return shuffled(Folded()), torch.randn(2, TOKENS, WIDTH)


def windows() -> Built:
    """Five axes: windows of tokens, each attended to by itself."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(len(x), 2, -1, 3, HEADS, 8).permute(3, 0, 1, 4, 2, 5)
            y = F.scaled_dot_product_attention(q, k, v)
            return x + self.out(y.transpose(2, 3).reshape(x.shape))

    return shuffled(Windows()), torch.randn(2, TOKENS, WIDTH)


def pixels() -> Built:
    """Projections by convolution over a map of features, and values that stand before the weights."""

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, HEADS, -1)).unbind(1)
            weights = (q.mT @ k / 3).softmax(-1)
            return x + self.out((v @ weights.mT).reshape(x.shape))

    return shuffled(Pixels()), torch.randn(2, WIDTH, 3, 4)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
BETWEEN = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
HEADED: dict[str, tuple[Callable[[], Built], str]] = {
    "gpt2": (gpt2, "c_proj.weight"),
    "llama": (llama, "o_proj.weight"),
    "llama_eager": (lambda: llama(attn_implementation="eager"), "o_proj.weight"),
    "neox": (lambda: neox(True), "dense.weight"),
    "bloom": (without_alibi, "dense.weight"),
    "gpt_neo": (
        lambda: small(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            **SIZES | {"num_heads": HEADS, "num_layers": LAYERS, "attention_types": [[["global", "local"], 1]]},
        ),
        "out_proj.weight",
    ),
    "gptj": (lambda: small("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **GPT), "out_proj.weight"),
    "codegen": (lambda: small("CodeGenForCausalLM", "CodeGenConfig", rotary_dim=4, **GPT), "out_proj.weight"),
    "bigcode one key": (lambda: small("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **GPT), "c_proj.weight"),
    "bigcode": (
        lambda: small("GPTBigCodeForCausalLM", "GPTBigCodeConfig", multi_query=False, **GPT),
        "c_proj.weight",
    ),
    "falcon one key": (lambda: small("FalconForCausalLM", "FalconConfig", **SIZES), "dense.weight"),
    "falcon": (lambda: small("FalconForCausalLM", "FalconConfig", multi_query=False, **SIZES), "dense.weight"),
    "falcon grouped": (
        lambda: small("FalconForCausalLM", "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, **SIZES),
        "dense.weight",
    ),
    "phi3": (lambda: small("Phi3ForCausalLM", "Phi3Config", **GROUPED), "o_proj.weight"),
    "olmo2": (lambda: small("Olmo2ForCausalLM", "Olmo2Config", **GROUPED), "o_proj.weight"),
    "qwen3": (lambda: small("Qwen3ForCausalLM", "Qwen3Config", **GROUPED), "o_proj.weight"),
    "gemma2": (lambda: gemma2(), "o_proj.weight"),
    "gpt_oss": (
        lambda: small("GptOssForCausalLM", "GptOssConfig", experts_implementation="eager", **GROUPED),
        "o_proj.weight",
    ),
    "t5": (lambda: without_bias(t5()), "o.weight"),
    "bart": (
        lambda: small(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            max_position_embeddings=32,
        ),
        "out_proj.weight",
    ),
    "whisper": (audio, "out_proj.weight"),
    "clip": (
        lambda: vision("CLIPVisionModel", "CLIPVisionConfig", hidden_size=WIDTH, num_attention_heads=HEADS),
        "out_proj.weight",
    ),
    "multi-head attention": (lambda: torch_encoder(True, False), "out_proj.weight"),
    "by kind": (layout(by_kind), "out.weight"),
    "by kind, normed": (layout(by_kind, norm=True), "out.weight"),
    "by head": (layout(by_head), "out.weight"),
    "by group": (layout(by_group, 2 * WIDTH), "out.weight"),
    "einsum": (einsum_heads, "out.weight"),
    "folded": (folded_queries, "out.weight"),
    "windows": (windows, "out.weight"),
    "pixels": (pixels, "out.weight"),
}


def without_bias(built: Built) -> Built:
    """T5 with the same position bias for all heads."""
    with torch.no_grad():
        for name, parameter in built[0].named_parameters():
            if "relative_attention_bias" in name:
                parameter.fill_(0.5)
    return built


def in_double(name: str) -> tuple[nn.Module, Any, str]:
    build, output = HEADED[name]
    model, inputs = build()
    return model.double(), tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs), output


@pytest.mark.parametrize("name", HEADED)
def test_heads_can_be_permuted_by_the_rows_named(name: str) -> None:
    model, inputs, output = in_double(name)
    before = outputs(model, inputs)
    for site in anatomy_of(model, inputs).attention:
        permute_heads(model, site, output if site.path == "." else f"{site.path}.{output}")
        middle = outputs(model, inputs)
        assert (middle - before).abs().max() < 1e-6  # norms in float32 sum in another order


@pytest.mark.parametrize("name", HEADED)
def test_permuting_less_than_all_rows_moves_the_output(name: str) -> None:
    model, inputs, output = in_double(name)
    before = outputs(model, inputs)
    site = anatomy_of(model, inputs).attention[0]
    for left_out in ("q", "k", "v"):
        with restored(dict(model.named_parameters())):
            permute_heads(model, site, output if site.path == "." else f"{site.path}.{output}")
            found = site.columns[left_out]
            heads = tuple(dict.fromkeys(found.heads))
            if len(heads) == 1:
                continue  # one key for all heads: there is nothing to permute
            permute_rows(model, found.model_copy(update={"heads": heads}), list(reversed(range(len(heads)))))
            assert (outputs(model, inputs) - before).abs().max() > 1e-4


def test_why_rows_are_not_known_is_said() -> None:
    small = SMALL | {"num_key_value_heads": HEADS, "q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 2}
    small |= {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": LAYERS}
    latent = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": HIDDEN}
    model, inputs = hugging_face("DeepseekV3ForCausalLM", "DeepseekV3Config", **small, **latent)
    report = normprobe.probe(model, inputs, level="structure")
    assert {tuple(site.columns) for site in report.anatomy.attention} == {("q", "v")}
    (skip,) = (s for s in report.skipped if "weight rows" in s.what)
    assert skip.what == "weight rows behind k at model.layers.0.self_attn and 1 more"
    assert "no single product" in skip.why


class Unprojected(nn.Module):
    """A decoder's block whose attention has no projection behind it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm, self.fused = nn.LayerNorm(8), fused
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(*y.shape[:2], 2, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        weighed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        return x + weighed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fused", [True, False])
def test_queries_and_keys_write_nothing(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Unprojected(fused), Unprojected(fused))
    (stream,) = anatomy_of(model, torch.randn(2, 5, 8)).streams
    assert [set(b.writers) for b in stream.branches] == [{f"{i}.v.weight", f"{i}.v.bias"} for i in (1, 2)]
