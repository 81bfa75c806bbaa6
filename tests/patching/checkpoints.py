"""Tiny checkpoints to patch, with everything that comes along with one."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

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
