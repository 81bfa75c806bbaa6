"""Load a patched checkpoint, or put its changes into a model of one's own."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normprobe.capture.writes import writable
from normprobe.checkpoints.header import ALIGNED
from normprobe.checkpoints.opened import Opened, opened
from normprobe.errors import CheckpointError
from normprobe.patching.loadable import check_folder, check_weights, with_weights
from normprobe.structure.become import become_patched
from normprobe.structure.field import FIELD
from normprobe.structure.kinds import KINDS
from normprobe.structure.modelling import recorded_base, transformers_class
from normprobe.structure.restore import main_dtype, restore
from normprobe.targets.config import read_config
from normprobe.targets.heads import model_class
from normprobe.targets.options import TargetOptions
from normprobe.targets.quiet import quiet


@torch.inference_mode(False)
def load(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The model in a folder that `normprobe patch` wrote, in eval mode; none of the folder's code is run.

    Args:
        folder: the checkpoint.
        options: for `from_pretrained`, such as `dtype` and `device_map`; with `output_loading_info` the model comes
            with what transformers says of it.

    Raises:
        CheckpointError: the folder has no configuration or is an adapter; weights are missing, not whole, of other
            shapes than the configuration says, or pickles without `use_safetensors=False` (with it the errors of files
            are those of transformers).
        TargetError: the configuration cannot be read, transformers has no model for it, or lacks the class that was
            patched.
    """
    path = _folder(folder)
    check_weights(path, options)
    config = _config(path)
    asked = {{"torch_dtype": "dtype"}.get(name, name): value for name, value in options.items()}
    given = {"dtype": "auto", "local_files_only": True, **asked}
    model, told = with_weights(model_class(config), path, config, path, given)
    return (model.eval(), told) if options.get("output_loading_info") else model.eval()


def apply_manifest(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Put the changes and the weights of a patched checkpoint into a model that was built as the original is.

    Args:
        model: of the architecture that was patched, its weights of any value; changed in place. Each weight keeps its
            dtype and device. One of transformers gets the class that `load` gives and a configuration of its own, so
            that it is saved with the changes.
        folder: the checkpoint.

    Returns:
        The model.

    Raises:
        CheckpointError: the checkpoint lists no changes or lacks weights; the model has changes already, is of another
            architecture, or is offloaded in part. It is then as it was.
        TargetError: transformers lacks the class that was patched.
    """
    path = _folder(folder)
    config = _config(path)
    record = getattr(config, FIELD, None)
    if record is None:
        raise CheckpointError(f"{path} lists no changes", expected=f'"{FIELD}" in config.json', hint="from_pretrained")
    base = _base(model, config, path)
    with opened(path) as found:
        state = _state(found, config, main_dtype(model), path)
        if transformers_class(model) is not None:
            become_patched(model, base, config, path)
        restore(model, record["changes"], KINDS)
        _fill(model, state)
    return model


def _fill(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights in, for the same outputs into memory that is aligned as that of torch is; a tensor that was
    mapped from a file may lie elsewhere. What another shares stays where it is."""
    own = model.state_dict(keep_vars=True)
    held = Counter(tensor.data_ptr() for tensor in {id(tensor): tensor for tensor in own.values()}.values())
    for name, tensor in own.items():
        with writable(tensor):
            if tensor.data_ptr() % ALIGNED and held[tensor.data_ptr()] == 1:
                tensor.data = torch.empty_like(tensor)
            tensor.copy_(state[name])


def _state(found: Opened, config: Any, dtype: torch.dtype, path: Path) -> dict[str, torch.Tensor]:
    """The weights by the names of the model, which files may have others for."""
    options = {"dtype": dtype, "local_files_only": True, "state_dict": dict(found.tensors)}
    with quiet():
        twin, _ = with_weights(model_class(config), path, config, None, options)
    state: dict[str, torch.Tensor] = twin.state_dict()
    return state


def _base(model: nn.Module, config: Any, path: Path) -> type[Any]:
    """The class of transformers that was patched.

    Raises:
        CheckpointError: the model has changes, is of another class of transformers, or does not hold what the original
            held.
    """
    base: type[Any] = recorded_base(config)
    kind = transformers_class(model)
    _refuse_changed(model, base)
    if kind is not None and not issubclass(kind, base):
        what = f"{type(model).__name__} is not what was patched"
        raise CheckpointError(what, expected=f"{base.__name__}, as {path} says", found=kind.__name__)
    with torch.device("meta"), quiet():
        original: nn.Module = base(copy.deepcopy(config))
    wanted, held = ({key: tuple(t.shape) for key, t in each.state_dict().items()} for each in (original, model))
    for key in (*wanted, *held):
        if wanted.get(key) != held.get(key):
            expected, found = (str(shapes.get(key, "none")) for shapes in (wanted, held))
            what = f"{type(model).__name__} is not what was patched: {key} is another"
            raise CheckpointError(what, expected=f"{expected}, as {path} says", found=found)
    return base


def _refuse_changed(model: nn.Module, base: type[Any]) -> None:
    """Refuse a model that was patched already, and one that nothing can be copied into."""
    if hasattr(model, "normprobe_kinds"):
        what, expected = f"{type(model).__name__} has the changes of a patched checkpoint already", base.__name__
        raise CheckpointError(what, expected=f"a {expected} as it was before", hint="normprobe.load gives it whole")
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < len(list(model.parameters())):
        raise CheckpointError(
            f"{type(model).__name__} is offloaded in part",
            expected="all weights in memory",
            found=f"{on_meta[0]} on the meta device",
            hint="normprobe.load(folder, device_map=…) offloads as it loads",
        )


def _config(path: Path) -> Any:
    return read_config(path / "config.json", TargetOptions())


def _folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    check_folder(path)
    return path
