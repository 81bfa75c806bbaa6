"""A name becomes a model and its inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from normprobe.checkpoints.names import listed, plural
from normprobe.checkpoints.weights import PICKLE_SUFFIXES
from normprobe.errors import InputError, TargetError
from normprobe.records import Skipped, Target
from normprobe.targets.config import build_config, default_config, is_model_type, read_config
from normprobe.targets.factory import load_factory
from normprobe.targets.folder import load_folder
from normprobe.targets.gguf import load_gguf
from normprobe.targets.hub import HUB_ID, load_hub
from normprobe.targets.inputs import check_text_file, make_inputs
from normprobe.targets.options import Built, Loaded, TargetOptions
from normprobe.targets.place import dtype_names, parse_device, parse_dtype, to_device_dtype


def resolve(name: str, options: TargetOptions | None = None) -> Loaded:
    """Turn `name` into a model in eval mode and inputs for one forward.

    `name` is, in this order: a `file.py:factory`; an existing folder or file (checkpoint folder, config.json,
    .gguf); with `config_only` a model type of transformers; a `package.module:factory`; a hub id.

    Raises:
        TargetError: the name is none of these, or what it names is broken, refused or not to be built.
        CheckpointError: a weight file is broken, missing or refused.
        InputError: a text was asked for that cannot be used.
        SettingError: unknown device or dtype.
    """
    options = options or TargetOptions()
    _check_name(name, options)
    device = parse_device("meta" if options.meta else options.device)
    dtype = parse_dtype(options.dtype)
    built = _build(name, options)
    _check_parameters(built.model, name, meta=device.type == "meta")
    model = to_device_dtype(built.model, device, dtype).eval()
    built = replace(built, model=model, inputs=to_device_dtype(built.inputs, device, dtype))
    inputs, described, notes = _inputs(built, options)
    return Loaded(
        model=model,
        inputs=inputs,
        tokenizer=built.tokenizer,
        target=_target(name, built, described),
        notes=built.notes + notes,
        missing=built.missing,
        unexpected=built.unexpected,
        skipped=_skipped(built),
    )


def _check_name(name: str, options: TargetOptions) -> None:
    """Refuse an empty name, which would mean the current folder, and a text file that is not there."""
    if not name.strip():
        raise TargetError("no target is named", expected="a folder, file, factory or hub id", found=repr(name))
    check_text_file(options)


def _check_parameters(model: nn.Module, name: str, *, meta: bool) -> None:
    """Refuse a model that has no values, or no shapes, to be moved and measured."""
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    lazy = next((key for key, tensor in tensors.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise TargetError(
            f"{name}: a lazy module, {lazy} has no shape yet",
            expected="a model whose parameters have shapes",
            hint="run it once first, in the factory: model(inputs)",
        )
    empty = next((key for key, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None and not meta:
        raise TargetError(
            f"{name}: {empty} is on the meta device and has no values",
            expected="a model with weights",
            hint="--meta reads its structure alone; or build it without the meta device",
        )


def _skipped(built: Built) -> tuple[Skipped, ...]:
    if not built.missing:
        return ()
    count = plural(len(built.missing), "tensor")
    why = f"not in the checkpoint, newly initialised: {listed(built.missing)}"
    return (Skipped(what=f"the trained values of {count}", why=why),)


def _build(name: str, options: TargetOptions) -> Built:
    path = Path(name).expanduser()
    if path.exists():
        options.refuse("the target is no hub id", "revision")
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        return load_factory(where, attribute, options, name)
    if path.is_dir():
        return load_folder(path, options, name)
    if path.is_file():
        return _build_file(path, options, name)
    if options.config_only and is_model_type(name):
        return build_config(default_config(name), options, name)
    if where and all(part.isidentifier() for part in (*where.split("."), *attribute.split("."))):
        return load_factory(where, attribute, options, name)
    if HUB_ID.fullmatch(name) and not _looks_like_a_file(path):
        return load_hub(name, options)
    raise TargetError(
        f"no such file or folder: {name}",
        expected="a checkpoint folder, config.json, .gguf, file.py:factory, package.module:factory or hub id",
        found=f"nothing at {path.absolute()}",
    )


def _build_file(path: Path, options: TargetOptions, name: str) -> Built:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return load_gguf(path, options, name)
    if suffix == ".json":
        return build_config(read_config(path, options), options, name)
    if suffix == ".py":
        raise TargetError(f"{name}: which function?", expected=f"{name}:factory", found="a file alone")
    if suffix in PICKLE_SUFFIXES:
        raise TargetError(
            f"{name}: a pickle by itself is refused",
            expected="a checkpoint folder or a factory",
            found="a pickle, which can run code when read and does not say what model it belongs to",
            hint="a factory that builds the model and loads it with torch.load(…, weights_only=True); "
            "or save the model with save_pretrained",
        )
    if suffix == ".safetensors":
        raise TargetError(
            f"{name}: weights alone do not say what model they belong to",
            hint=f"its folder, with a config.json ({path.parent}); or a factory that loads them",
        )
    raise TargetError(
        f"{name}: not a kind of file that holds a model",
        expected="config.json, .gguf, or file.py:factory",
        found=suffix or "no suffix",
    )


def _looks_like_a_file(path: Path) -> bool:
    suffixes = (".json", ".gguf", ".py", ".safetensors", *PICKLE_SUFFIXES)
    return path.is_absolute() or path.suffix.lower() in suffixes


def _inputs(
    built: Built, options: TargetOptions
) -> tuple[tuple[Any, ...] | dict[str, Any] | None, str, tuple[str, ...]]:
    """Inputs, their description, and notes. Without inputs the note says why."""
    if built.inputs is not None:
        options.refuse("the factory gives its own inputs", "text", "text_file", "tokens", "batch")
        return built.inputs, "given by the factory", ()
    try:
        inputs, described, notes = make_inputs(built.model, built.tokenizer, options)
    except InputError as error:
        if options.text is not None or options.text_file is not None:
            raise
        options.refuse(f"no inputs can be made ({error.message})", "tokens", "batch")
        return None, "", (f"no inputs: {error.message}",)
    return inputs, described, notes


def _target(name: str, built: Built, described: str) -> Target:
    model: nn.Module = built.model
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return Target(
        name=name,
        source=built.source,
        class_name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype_names(model),
        device=str(tensor.device) if tensor is not None else "cpu",
        inputs=described,
        revision=built.revision,
    )
