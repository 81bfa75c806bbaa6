"""Load a patched checkpoint, or put its changes into a model of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normprobe.checkpoints.opened import opened
from normprobe.errors import CheckpointError
from normprobe.structure.field import FIELD
from normprobe.structure.kinds import KINDS
from normprobe.structure.restore import restore
from normprobe.targets.heads import model_class


def load(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The model in a folder that `normprobe patch` wrote, in eval mode; none of the folder's code is run.

    Args:
        folder: the checkpoint.
        options: for `from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        CheckpointError: the folder has no configuration.
        TargetError: transformers has no model for the configuration, or lacks the class that was patched.
    """
    from transformers import AutoConfig

    path = _folder(folder)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    loader = model_class(config)
    return loader.from_pretrained(path, config=config, **{"dtype": "auto", "local_files_only": True, **options}).eval()


def apply_manifest(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Put the changes and the weights of a patched checkpoint into a model that was built as the original is.

    Args:
        model: of the architecture that was patched, its weights of any value; changed in place.
        folder: the checkpoint.

    Returns:
        The model.

    Raises:
        CheckpointError: the checkpoint lists no changes, or the model is of another architecture; it is then as it was.
    """
    path = _folder(folder)
    config = _config(path)
    changes = config.get(FIELD, {}).get("changes")
    if changes is None:
        raise CheckpointError(f"{path} lists no changes", expected=f'"{FIELD}" in config.json', hint="from_pretrained")
    _check_fits(model, changes, path)
    with opened(path) as found:
        restore(model, changes, KINDS)
        _fill(model, found.tensors, path)
    return model


def _check_fits(model: nn.Module, changes: list[Mapping[str, Any]], path: Path) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    needed = {change.get("from", change["path"]) for change in changes if "module" not in change}
    missing = sorted(needed - modules.keys())
    if missing:
        expected = f"a module {missing[0]}, as in {path}"
        raise CheckpointError(f"{type(model).__name__} is not what was patched", expected=expected, found="none")


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy the weights in; each keeps the dtype and the device that the model has it in."""
    state = model.state_dict()
    absent = [name for name in state if name not in tensors]
    tied = {state[name].data_ptr() for name in state if name in tensors}
    lost = [name for name in absent if state[name].data_ptr() not in tied]
    if lost:
        raise CheckpointError(f"{path} lacks weights of {type(model).__name__}", found=f"none for {lost[0]}")
    with torch.no_grad():
        for name, held in state.items():
            if name in tensors:
                held.copy_(tensors[name])


def _config(path: Path) -> dict[str, Any]:
    from normprobe.checkpoints.weights import read_json

    return read_json(path / "config.json")


def _folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json", expected="a folder that normprobe patch wrote")
    return path
