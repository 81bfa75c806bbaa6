"""Tiny checkpoints that a test can write in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from normprobe.targets.quiet import quiet, seeded

VOCABULARY = 64


def gpt2_config(**fields: Any) -> GPT2Config:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    return GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **fields})


def gpt2(folder: Path, shard: str = "5GB", **fields: Any) -> GPT2LMHeadModel:
    with seeded(7), quiet():
        model = GPT2LMHeadModel(gpt2_config(**fields))
        model.save_pretrained(folder, max_shard_size=shard)
    return model


def bert(folder: Path) -> BertModel:
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=40,
    )
    with seeded(7), quiet():
        model = BertModel(config)
        model.save_pretrained(folder)
    return model


def config_file(folder: Path, **fields: Any) -> Path:
    """A config.json with these fields over the tiny GPT-2's; None drops a field."""
    folder.mkdir(parents=True, exist_ok=True)
    values = gpt2_config().to_dict() | {"model_type": "gpt2"} | fields
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def tokenizer_file(folder: Path, words: int = VOCABULARY) -> None:
    """A word-level tokenizer with <s> around the text: id 0 is unknown, 1 and 2 are the special ids."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    common = ("the", "a", "of", "and", "to", "was", "she", "in", "had", "it", ".", ",")
    vocabulary |= {word: 3 + i for i, word in enumerate(common)}
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), words)}
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in ("<s>", "</s>")
        },
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": template,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Whether two models hold the same tensors, bit for bit."""
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def edit_weights(path: Path, rename: dict[str, str] | None = None, **replaced: Tensor | None) -> None:
    """Rewrite a safetensors file: parts of names renamed, then tensors replaced (None drops one)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for old, new in (rename or {}).items():
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    for key, value in replaced.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path, metadata={"format": "pt"})
