"""From a configuration alone: random weights, or none at all on the meta device."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normprobe.checkpoints.weights import read_json
from normprobe.errors import TargetError
from normprobe.structure.field import FIELD
from normprobe.targets.heads import builder
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.place import parse_dtype
from normprobe.targets.quiet import quiet, seeded


def is_model_type(name: str) -> bool:
    """Whether transformers knows a configuration of this model type."""
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING


def close_types(name: str, most: int = 3) -> list[str]:
    """Model types of transformers whose name is a word of `name` or is spelt much like it, the closest first."""
    from transformers import CONFIG_MAPPING

    asked = name.rsplit("/", 1)[-1].lower().replace("-", "_")
    known = {kind.replace("-", "_"): kind for kind in CONFIG_MAPPING}
    words = sorted((kind for kind in known if kind in re.split(r"[^a-z0-9]+", asked)), key=len, reverse=True)
    alike = difflib.get_close_matches(asked, known, n=most)
    return [known[kind] for kind in dict.fromkeys((*words, *alike))][:most]


def default_config(model_type: str) -> Any:
    """The configuration that transformers gives `model_type` by default.

    Raises:
        TargetError: the configuration cannot be made without further fields.
    """
    from transformers import CONFIG_MAPPING

    try:
        with quiet():
            return CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise TargetError(
            f"model type {model_type!r} has no default configuration",
            found=f"{type(error).__name__}: {error}",
            hint="write a config.json and name that",
        ) from error


def read_config(path: Path, options: TargetOptions) -> Any:
    """The configuration in `path`, a .json file.

    Raises:
        TargetError: it is missing or broken, of an unknown model type, or needs code that was not allowed.
    """
    if not path.exists():
        hint = "copy it from where the weights come from: it says which model they are of"
        raise TargetError(f"{path} is missing", expected="the configuration beside the weights", hint=hint)
    fields = read_json(path)
    check_fields(path, fields, options)
    import transformers

    remote = own_code(fields) and options.trust_remote_code
    where = path.parent if path.name == "config.json" else path
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(where, trust_remote_code=remote, local_files_only=True)
    except Exception as error:
        raise TargetError(
            f"{path}: transformers cannot read this configuration",
            found=f"{type(error).__name__}: {error}",
        ) from error


def own_code(fields: Mapping[str, Any]) -> bool:
    """Whether the model is code that comes with the checkpoint; what a patch changed is listed, and needs none."""
    return bool(fields.get("auto_map")) and FIELD not in fields


def check_fields(path: Path, fields: dict[str, Any], options: TargetOptions) -> None:
    """Refuse a configuration that is of no known model type, or whose model is code that came with it."""
    import transformers

    if own_code(fields):
        if not options.trust_remote_code:
            raise TargetError(
                f"{path}: the model is Python code that comes with the checkpoint (auto_map)",
                expected="a model of transformers",
                found=", ".join(sorted(str(value) for value in fields["auto_map"].values())),
                hint="--trust-remote-code runs that code; read it first",
            )
        return
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        found = f"keys {', '.join(list(fields)[:8])}" if fields else "no keys"
        hint = "a factory (file.py:function) that returns the model"
        raise TargetError(f"{path}: not a model of transformers", expected="model_type", found=found, hint=hint)
    if not is_model_type(model_type):
        raise TargetError(
            f"{path}: unknown model type {model_type!r}",
            found=f"transformers {transformers.__version__}, which has no such model",
            hint="a newer transformers, or a factory (file.py:function) that returns the model",
        )


def build_config(config: Any, options: TargetOptions, name: str, source: str = "config") -> Built:
    """A model of `config`, with seeded random weights, or on meta without any.

    Raises:
        TargetError: the model cannot be built from it, or does not fit in memory.
    """
    dtype = parse_dtype(options.dtype) or _dtype_of(config)
    build = builder(config, options.trust_remote_code)
    with quiet(), seeded(options.seed):
        try:
            model = _on_meta(build, config, dtype)
            if not options.meta:
                check_memory(model, name)
                model = _in_memory(build, config, dtype)
        except TargetError:
            raise
        except Exception as error:
            raise TargetError(
                f"{name}: no model can be built from this {type(config).__name__}",
                found=f"{type(error).__name__}: {error}",
            ) from error
    random, empty = f"random weights (seed {options.seed})", "meta device: shapes without weights"
    return Built(model, source, notes=(empty if options.meta else random,))


def _on_meta(build: Callable[[Any], Any], config: Any, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return _in_memory(build, config, dtype)


def _in_memory(build: Callable[[Any], Any], config: Any, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model: nn.Module = build(config)
    finally:
        torch.set_default_dtype(before)
    return model


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def check_memory(model: nn.Module, name: str) -> None:
    """Refuse a model (given on meta) that is larger than the memory at hand.

    Raises:
        TargetError: parameters and buffers need more bytes than are free.
    """
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = available_memory()
    if free is not None and needed > free:
        count = sum(parameter.numel() for parameter in model.parameters())
        raise TargetError(
            f"{name}: too large for this machine's memory",
            expected=f"at most {free / 2**30:.1f} GiB",
            found=f"{count:,} parameters, {needed / 2**30:.1f} GiB",
            hint="--meta reads the structure without memory; or a smaller config.json",
        )


def available_memory() -> int | None:
    """Bytes of memory that can still be taken, None where the system does not say."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
