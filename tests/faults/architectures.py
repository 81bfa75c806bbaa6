"""The models that faults are planted in: new ones, as their own code draws their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.checks.norm_free import networks
from tests.faults.running import Subject
from tests.models import SMALL, VOCABULARY, WIDTH, Built, ids


def transformer(model_class: str, config_class: str, **fields: object) -> Built:
    """A small model of transformers with its own initialisation."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields)
    return getattr(transformers, model_class)(config).eval(), {"input_ids": ids()}


def gpt2() -> Built:
    small = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 3, "n_head": 8}
    return transformer("GPT2LMHeadModel", "GPT2Config", **small, bos_token_id=1, eos_token_id=2)


def llama() -> Built:
    return transformer("LlamaForCausalLM", "LlamaConfig", **SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2})


def bert() -> Built:
    return transformer("BertForMaskedLM", "BertConfig", **SMALL | {"num_hidden_layers": 3})


def gemma3() -> Built:
    small = SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    return transformer("Gemma3ForCausalLM", "Gemma3TextConfig", **small)


def granite() -> Built:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    small = SMALL | factors | {"num_hidden_layers": 3, "num_key_value_heads": 2, "attention_multiplier": 0.3}
    return transformer("GraniteForCausalLM", "GraniteConfig", **small)


def cohere() -> Built:
    small = SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2, "use_qk_norm": True}
    return transformer("CohereForCausalLM", "CohereConfig", **small)


def by_hand() -> Built:
    """A pre-norm decoder in plain torch, with torch's own initialisation."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [models.Block(models.layer_norm, "pre") for _ in range(3)]
    return models.Decoder(blocks, models.layer_norm()).eval(), ids()


class Residual(nn.Module):
    """Two convolutions, each with a batch norm, around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_too = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(x + self.norm_too(self.second(y)))


class Pictures(nn.Module):
    """A residual network of the first kind, with a classifier."""

    def __init__(self, channels: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def pictures() -> Built:
    torch.manual_seed(0)
    return Pictures().eval(), torch.randn(8, 3, 12, 12)


class Deep(models.Decoder):
    """Twelve blocks drawn as GPT-2's are: a fixed deviation, divided by the root of the writes where they write."""

    def __init__(self) -> None:
        blocks: list[nn.Module] = [models.Block(models.layer_norm, "pre") for _ in range(12)]
        super().__init__(blocks, models.layer_norm())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for layer in self.modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)
        for block in blocks:
            for branch in (block.mix.branch.out, block.think.branch.down):
                nn.init.normal_(branch.weight, std=0.02 / 24**0.5)


def deep() -> Built:
    torch.manual_seed(0)
    return Deep().eval(), ids()


def layers() -> Built:
    """Layers with ReLU, one behind the other, drawn for it."""
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    steps = [step for layer in linear for step in (layer, nn.ReLU())]
    return nn.Sequential(*steps, nn.Linear(WIDTH, 5)).eval(), torch.randn(16, WIDTH)


def free() -> Built:
    """Convolutions with standardised weights and constants in place of norms."""
    torch.manual_seed(0)
    return networks.Free().eval(), torch.randn(networks.IMAGE)


def vocoder() -> Built:
    """Convolutions with normed weights."""
    torch.manual_seed(0)
    return networks.Vocoder().eval(), torch.randn(2, 4, 40)


BUILDS = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "gemma3": gemma3,
    "granite": granite,
    "cohere": cohere,
    "by_hand": by_hand,
    "pictures": pictures,
    "deep": deep,
    "layers": layers,
    "free": free,
    "vocoder": vocoder,
}


def subjects() -> list[Subject]:
    """All of them."""
    return [Subject(name, build) for name, build in BUILDS.items()]
