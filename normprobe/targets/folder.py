"""A local checkpoint folder: config.json with safetensors, with a pickle if allowed, or alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from normprobe.checkpoints.weights import find_weights
from normprobe.errors import TargetError
from normprobe.targets.config import build_config, own_code, read_config
from normprobe.targets.heads import auto_with_code, model_class
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.pretrained import load_pretrained
from normprobe.targets.tokenizers import read_tokenizer


def load_folder(folder: Path, options: TargetOptions, name: str, source: str = "folder") -> Built:
    """The model saved in `folder`; random weights where it holds only a configuration.

    Raises:
        TargetError: no config.json, or a model that transformers cannot build.
        CheckpointError: a weight file is broken, missing or refused.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise TargetError(f"{folder}: no config.json", expected="a checkpoint folder", found=_contents(folder))
    skip = options.config_only or options.meta
    weights = None if skip else find_weights(folder, options.allow_pickle)
    config = read_config(path, options)
    tokenizer, note = read_tokenizer(folder, trust=options.trust_remote_code)
    if weights is None:
        if not skip:
            _refuse_other_weights(folder, options)
        built = build_config(config, options, name, source if skip else "config")
    else:
        built = _with_weights(folder, config, options, name, source, weights.safe)
    return replace(built, tokenizer=tokenizer, notes=built.notes + note)


def _with_weights(folder: Path, config: Any, options: TargetOptions, name: str, source: str, safe: bool) -> Built:
    trusted = own_code(vars(config)) and options.trust_remote_code
    loader = auto_with_code(config) if trusted else model_class(config)
    extra = {"trust_remote_code": True} if trusted else {}
    return load_pretrained(loader, folder, config, options, name, source, use_safetensors=safe, **extra)


def _refuse_other_weights(folder: Path, options: TargetOptions) -> None:
    """A folder with weights under other names is not a bare configuration: random weights would mislead."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
    others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in suffixes)
    if others:
        raise TargetError(
            f"{folder}: no weights under a name that transformers reads",
            expected="model.safetensors or model.safetensors.index.json",
            found=", ".join(others[:5]),
            hint=options.hint("--config-only for random weights", "name a .gguf file itself"),
        )


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return (", ".join(names[:8]) + (" …" if len(names) > 8 else "")) or "an empty folder"
