"""What a folder has to hold to be loaded, looked for in headers before transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normprobe.checkpoints.names import listed, plural
from normprobe.checkpoints.weights import SAFE, SAFE_INDEX, find_weights, read_json
from normprobe.errors import CheckpointError

ADAPTER = "adapter_config.json"
_ELSEWHERE = ("state_dict", "gguf_file", "subfolder", "variant")  # options by which other files are read


def check_folder(folder: Path) -> None:
    """Refuse what has no configuration, or only changes another model.

    Raises:
        CheckpointError: there is no folder, it has no configuration, or it is an adapter.
    """
    expected = "a folder that normprobe patch wrote"
    if not folder.is_dir():
        found = "a file" if folder.exists() else f"nothing at {folder.absolute()}"
        raise CheckpointError(f"{folder} is no folder", expected=expected, found=found)
    if (folder / ADAPTER).is_file():
        base, hint = base_of_adapter(folder), f'peft.PeftModel.from_pretrained(normprobe.load(BASE), "{folder}")'
        raise CheckpointError(f"{folder} is an adapter", expected=expected, found=f"an adapter of {base}", hint=hint)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json", expected=expected, found=_held(folder))


def check_weights(folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse weights that are not there or not whole, and pickles that were not asked for.

    Args:
        folder: where they lie.
        options: as of `from_pretrained`; where they name other files, nothing is looked for.

    Raises:
        CheckpointError: a file is truncated, corrupt or missing, there is none, or they are pickles.
    """
    if options.get("use_safetensors") is False or any(options.get(name) for name in _ELSEWHERE):
        return
    found = find_weights(folder, allow_pickle=True)
    expected = f"{SAFE} or {SAFE_INDEX}"
    if found is None:
        raise CheckpointError(f"{folder}: no weights", expected=expected, found=_held(folder))
    if not found.safe:
        hint = "use_safetensors=False reads their tensors alone; or save them again as safetensors"
        said = f"{found.files[0].name}, a pickle, which can run code when it is read"
        raise CheckpointError(f"{folder}: pickled weights are refused", expected=expected, found=said, hint=hint)


def with_weights(kind: Any, folder: Path, config: Any, source: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """A model of `kind` with its weights, and what transformers says of loading them.

    Args:
        kind: a class of transformers.
        folder: where the weights lie.
        config: its configuration.
        source: what `from_pretrained` takes first.
        options: for `from_pretrained`.

    Raises:
        CheckpointError: weights are missing, or of other shapes than the configuration says.
    """
    model, told = kind.from_pretrained(
        source, config=config, **{"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
    )
    hint = "write the folder anew: its files and its configuration do not belong together"
    for key, found, wanted in () if "ignore_mismatched_sizes" in options else sorted(told["mismatched_keys"]):
        shapes = {"expected": f"{tuple(wanted)}, by config.json", "found": str(tuple(found))}
        raise CheckpointError(f"{folder}: {key} has another shape", **shapes, hint=hint)
    if missing := sorted(told["missing_keys"]):
        what = f"{folder} lacks {plural(len(missing), 'tensor')} of a {kind.__name__}"
        raise CheckpointError(what, expected="every weight", found=f"none for {listed(tuple(missing))}", hint=hint)
    return model, told


def base_of_adapter(folder: Path) -> str:
    """What an adapter says that it is an adapter of."""
    return str(read_json(folder / ADAPTER).get("base_model_name_or_path", "its base model"))


def _held(folder: Path) -> str:
    return listed(tuple(sorted(entry.name for entry in folder.iterdir()))) or "an empty folder"
