"""Tiny models for tests: architectures from transformers, torch's encoder, and one hand-written decoder with options.

Every builder gives a model in eval mode and inputs for it, seeded, with no weight left at zero or one by accident
of the initialisation: gains, offsets and zero-initialised weights hide the facts that tests look for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WIDTH, HEADS, HIDDEN, LAYERS, VOCABULARY, TOKENS = 32, 4, 48, 2, 64, 8
Built = tuple[nn.Module, Any]


def made_in_inference_mode(built: Built) -> Built:
    """The same model and inputs with tensors that were made there; tied ones stay one."""
    model, inputs = built
    twins: dict[int, Tensor] = {}
    with torch.inference_mode():
        for name, held in [*model.named_parameters(), *model.named_buffers()]:
            twins[id(held)] = held.detach().clone()
            if isinstance(held, nn.Parameter):
                twins[id(held)] = nn.Parameter(twins[id(held)], held.requires_grad)
            assert twins[id(held)].is_inference(), name
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: twins[id(held)] for name, held in table.items() if held is not None})
        return model, pytree.tree_map_only(Tensor, torch.clone, inputs)


# ---- transformers

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shuffled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, every floating parameter moved by seeded noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def to_meta(model: nn.Module) -> nn.Module:
    """The model without values; what modules share they share still, which `model.to("meta")` would part."""
    bare: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor not in bare:
                    twin = tensor.detach().to("meta")
                    bare[tensor] = nn.Parameter(twin, False) if isinstance(tensor, nn.Parameter) else twin
                own[name] = None if tensor is None else bare[tensor]  # type: ignore[assignment]
    return model


def ids(batch: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def hugging_face(model_class: str, config_class: str, **fields: Any) -> Built:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields)
    inputs = {"input_ids": ids()}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids().flip(0)
    return shuffled(getattr(transformers, model_class)(config)), inputs


def gpt2(**fields: Any) -> Built:
    small = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **{**small, **tokens, **fields})


def llama(**fields: Any) -> Built:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=2, **fields)


def bert(**fields: Any) -> Built:
    return hugging_face("BertForMaskedLM", "BertConfig", **SMALL, **fields)


def t5(**fields: Any) -> Built:
    small = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": HIDDEN, "num_heads": HEADS}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return hugging_face("T5ForConditionalGeneration", "T5Config", num_layers=LAYERS, **small, **tokens, **fields)


def opt(before: bool, **fields: Any) -> Built:
    small = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"ffn_dim": HIDDEN}
    small |= {"word_embed_proj_dim": WIDTH, "do_layer_norm_before": before}
    return hugging_face("OPTForCausalLM", "OPTConfig", **small, **fields)


def neox(parallel: bool, **fields: Any) -> Built:
    return hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL, use_parallel_residual=parallel, **fields)


def gemma2(**fields: Any) -> Built:
    small = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 4}
    small |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attn_implementation": "eager"}
    return hugging_face("Gemma2ForCausalLM", "Gemma2Config", **small, **fields)


def qwen3(**fields: Any) -> Built:
    small = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
    return hugging_face("Qwen3ForCausalLM", "Qwen3Config", **small, **fields)


def olmo2(**fields: Any) -> Built:
    return hugging_face("Olmo2ForCausalLM", "Olmo2Config", **SMALL, num_key_value_heads=2, **fields)


def bloom(**fields: Any) -> Built:
    small = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hugging_face("BloomForCausalLM", "BloomConfig", **small, **tokens, **fields)


# ---- torch


def torch_encoder(norm_first: bool, final: bool) -> Built:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, norm_first=norm_first)
    norm = nn.LayerNorm(WIDTH) if final else None
    model = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
    return shuffled(model), torch.randn(2, TOKENS, WIDTH)


# ---- by hand


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class RMSNorm(nn.Module):
    """RMSNorm with `eps` inside the root, or added to it."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6, outside: bool = False) -> None:
        super().__init__()
        self.eps, self.outside = eps, outside
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.float().pow(2).mean(-1, keepdim=True)
        root = mean.sqrt() + self.eps if self.outside else (mean + self.eps).sqrt()
        return (x.float() / root).type_as(x) * self.weight


Norm = Callable[[], nn.Module]


class Sublayer(nn.Module):
    """One write to the stream: a branch, its norms, a skip factor and a branch scale.

    `placement`: pre, post, output, sandwich, none, or trunk (the skip is taken behind the norm).
    `scale`: none, a number, "scalar" (ReZero) or "channel" (LayerScale).
    """

    def __init__(
        self, branch: nn.Module, norm: Norm, placement: str, skip: float = 1.0, scale: str | float = "none"
    ) -> None:
        super().__init__()
        self.placement, self.skip, self.constant = placement, skip, scale if isinstance(scale, float) else 1.0
        self.branch = branch
        if placement != "none":
            self.norm = norm()
        if placement == "sandwich":
            self.norm_out = norm()
        if isinstance(scale, str) and scale != "none":
            self.gain = nn.Parameter(torch.full((1,) if scale == "scalar" else (WIDTH,), 0.3))

    def scaled(self, y: Tensor) -> Tensor:
        y = y if self.constant == 1.0 else self.constant * y
        return self.gain * y if hasattr(self, "gain") else y

    def forward(self, x: Tensor) -> Tensor:
        place = self.placement
        if place == "trunk":
            x = self.norm(x)
        y = self.branch(self.norm(x) if place in ("pre", "sandwich") else x)
        y = self.norm(y) if place == "output" else self.norm_out(y) if place == "sandwich" else y
        x = (x if self.skip == 1.0 else self.skip * x) + self.scaled(y)
        return self.norm(x) if place == "post" else x


class Block(nn.Module):
    def __init__(self, norm: Norm, placement: str, **options: Any) -> None:
        super().__init__()
        self.mix = Sublayer(Attention(), norm, placement, **options)
        self.think = Sublayer(Mlp(), norm, placement, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.mix(x))


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module], final: nn.Module | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.final = final
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.final is None else self.final(x))


def layer_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def decoder(placement: str, *, final: bool = True, norm: Norm = layer_norm, layers: int = 3, **options: Any) -> Built:
    """A decoder by hand; `options` go to every `Sublayer`."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(norm, placement, **options) for _ in range(layers)]
    return shuffled(Decoder(blocks, norm() if final else None)), ids()


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "opt_pre": lambda: opt(True),
    "opt_post": lambda: opt(False),
    "neox_parallel": lambda: neox(True),
    "neox_sequential": lambda: neox(False),
    "gemma2": gemma2,
    "qwen3": qwen3,
    "olmo2": olmo2,
    "bloom": bloom,
    "encoder_pre": lambda: torch_encoder(True, False),
    "encoder_pre_final": lambda: torch_encoder(True, True),
    "encoder_post": lambda: torch_encoder(False, False),
    "encoder_post_final": lambda: torch_encoder(False, True),
    "decoder_pre": lambda: decoder("pre"),
    "decoder_post": lambda: decoder("post", final=False),
    "decoder_rms": lambda: decoder("sandwich", norm=RMSNorm),
}
