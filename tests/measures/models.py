"""Tiny models with the places where their residual streams can be tapped by ordinary hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.anatomy.build import read
from normprobe.capture.invoke import invoke
from normprobe.capture.recorder import record
from normprobe.records import Anatomy

WIDTH, HEADS, VOCABULARY, LAYERS = 32, 4, 100, 3
Tap = tuple[nn.Module, str]


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and for every stream the taps ("in" or "out" of a module) at which its states pass."""

    model: nn.Module
    inputs: Any
    taps: tuple[tuple[Tap, ...], ...]


def anatomy_of(model: nn.Module, inputs: Any) -> Anatomy:
    return read(model, record(model, inputs)).anatomy


def ids(batch: int = 2, tokens: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode with parameters that are large enough for its attention to be uneven."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2(**options: Any) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    )
    model = shaken(_built(GPT2LMHeadModel, config, options))
    taps = [tap for block in model.transformer.h for tap in ((block.ln_2, "in"), (block, "out"))]
    return Case(model, {"input_ids": ids()}, (tuple(taps),))


def llama(**options: Any) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = shaken(_built(LlamaForCausalLM, config, options))
    taps = [t for b in model.model.layers for t in ((b.post_attention_layernorm, "in"), (b, "out"))]
    return Case(model, {"input_ids": ids()}, (tuple(taps),))


def t5(**options: Any) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=2, d_model=WIDTH, d_kv=8, d_ff=48, num_heads=HEADS, vocab_size=VOCABULARY)
    model = shaken(_built(T5ForConditionalGeneration, config, options))
    streams = [[(part, "out") for b in side.block for part in b.layer] for side in (model.encoder, model.decoder)]
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(tokens=7)}
    return Case(model, inputs, tuple(tuple(taps) for taps in streams))


def bert(**options: Any) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
    )
    model = shaken(_built(BertModel, config, options))
    layers = model.encoder.layer
    taps = [t for b in layers for t in ((b.attention.output.LayerNorm, "in"), (b.output.LayerNorm, "in"))]
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return Case(model, {"input_ids": ids(), "attention_mask": mask}, (tuple(taps),))


def neox(**options: Any) -> Case:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
    )
    model = shaken(_built(GPTNeoXForCausalLM, config, options))
    return Case(model, {"input_ids": ids()}, (tuple((b, "out") for b in model.gpt_neox.layers),))


def albert(**options: Any) -> Case:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        embedding_size=16,
        intermediate_size=48,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
    )
    model = shaken(_built(AlbertModel, config, options))
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    taps = ((layer.attention.LayerNorm, "in"), (layer.full_layer_layer_norm, "in"))
    return Case(model, {"input_ids": ids()}, (taps,))


def encoder(**options: Any) -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    model = shaken(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False))
    x = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(2))
    taps = [t for b in model.layers for t in ((b.norm1, "in"), (b.norm2, "in"))]
    return Case(model, (x,), (tuple(taps),))


class ResNet(nn.Module):
    """Post-activation blocks on channels-first maps, with the add and the activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(4))
        self.taps = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, relu in zip(self.blocks, self.taps, strict=True):
            y = block(x)
            y += x
            x = relu(y)
        return self.head(x.mean((2, 3)))


def resnet(**options: Any) -> Case:
    model = shaken(ResNet())
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(2))
    return Case(model, x, (tuple((relu, "in") for relu in model.taps),))


CASES: tuple[Callable[..., Case], ...] = (gpt2, llama, t5, bert, neox, albert, encoder, resnet)


def _built(build: Any, config: Any, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config._attn_implementation = options.get("attention", "sdpa")
    return build(config)


def tapped(model: nn.Module, inputs: Any, taps: Sequence[Tap]) -> list[Tensor]:
    """What passes the taps in one forward, in order of time, in float64."""
    found: list[Tensor] = []

    def keep(value: Any) -> None:
        tensor = value if isinstance(value, Tensor) else value[0]
        found.append(tensor.detach().double().clone())

    hooks = []
    for module, side in taps:
        if side == "in":
            hooks.append(module.register_forward_pre_hook(lambda m, args: keep(args)))
        else:
            hooks.append(module.register_forward_hook(lambda m, args, output: keep(output)))
    try:
        with torch.no_grad():
            invoke(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Adds(nn.Module):
    """A stream of bare adds: block i writes the i-th row of `writes` to every token, by way of a product."""

    def __init__(self, writes: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Write(row) for row in writes)
        self.norm = nn.LayerNorm(writes.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Write(nn.Module):
    """The same row for every token, whatever comes in (a product with 0, plus the row as bias)."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(len(row), len(row))
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.copy_(row)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)
