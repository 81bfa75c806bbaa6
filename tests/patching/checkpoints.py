"""Tiny checkpoints to patch, with everything that comes along with one, and what is read out of them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import normprobe
from normprobe.rewrites import Rewrite
from normprobe.targets.quiet import quiet, seeded

VOCABULARY = 64
IDS = torch.arange(24).reshape(2, 12) % VOCABULARY
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama(**fields: Any) -> LlamaForCausalLM:
    return made(LlamaForCausalLM, LlamaConfig(**{**SIZES, **HEADS, **fields}))


def mixtral(**fields: Any) -> MixtralForCausalLM:
    config = MixtralConfig(**{**SIZES, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, **fields})
    return made(MixtralForCausalLM, config)


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    return made(GPT2LMHeadModel, GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **fields}))


def made(kind: type[Any], config: Any) -> Any:
    """A model with gains, offsets and biases off 1 and 0, so that a rewrite of those can be seen to fail."""
    with seeded(3), torch.no_grad():
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model: Any, folder: Path, shard: str = "5GB") -> Path:
    """The checkpoint of `model` with files of all kinds beside its weights."""
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("as you like")
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("of mine")
    (folder / "optimizer.pt").write_bytes(b"no longer right")
    return folder


def tokenizer(folder: Path, **fields: Any) -> None:
    """A tokeniser beside the weights that gives one token a character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **fields}))


@cache
def _template(name: str, base: Path) -> Path:
    kinds = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}
    model = kinds[name.partition("-")[0]]()
    model = model.to(torch.bfloat16) if name.endswith("-bf16") else model
    return saved(model, base / name, "20KB" if "-sharded" in name else "5GB")


def checkpoint(folder: Path, name: str, base: Path) -> Path:
    """A copy of one of the checkpoints, which are made once: llama, gpt2, mixtral, with -sharded and -bf16."""
    return Path(shutil.copytree(_template(name, base), folder / "source"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor by its name."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def shards(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def config(folder: Path) -> dict[str, Any]:
    """What `config.json` says."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def in_memory(folder: Path, rewrites: list[Rewrite]) -> Any:
    """The model of a checkpoint, rewritten where it is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for rewrite in rewrites:
        normprobe.rewrite(model, rewrite, None)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found
