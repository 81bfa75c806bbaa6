"""What a name stands for: a checkpoint folder, a hub repository or a GGUF file, open with its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normprobe.checkpoints.carried import check_carried
from normprobe.checkpoints.dtypes import name_of
from normprobe.checkpoints.opened import Opened, opened
from normprobe.checkpoints.weights import SAFE
from normprobe.errors import CheckpointError
from normprobe.patching.built import Subject, build, refuse_adapter, refuse_incomplete, with_inputs
from normprobe.patching.options import PatchOptions
from normprobe.patching.scratch import Scratch
from normprobe.rewrites import Rewrite
from normprobe.targets.gguf import load_gguf
from normprobe.targets.hub import HUB_ID, whole_repository
from normprobe.targets.options import TargetOptions


@contextmanager
def read_subject(
    checkpoint: str, rewrites: Sequence[Rewrite], options: PatchOptions, scratch: Scratch
) -> Iterator[tuple[Subject, Opened]]:
    """As `opened_subject`, with inputs for one forward that serve these rewrites.

    Raises:
        InputError: none can be made; and all that `opened_subject` raises.
    """
    with opened_subject(checkpoint, options.reading(), scratch) as (subject, source):
        yield with_inputs(subject, options.inputs_for(rewrites, source.nbytes)), source


@contextmanager
def opened_subject(name: str, options: TargetOptions, scratch: Scratch) -> Iterator[tuple[Subject, Opened]]:
    """The model that `name` stands for, without inputs, and its weights, open until the end of the block.

    Args:
        name: a folder, a hub id or a .gguf file.
        options: how it is read.
        scratch: where weights go that are converted as they are loaded.

    Raises:
        CheckpointError: it holds no weights, broken ones or not all, an adapter, or quantised weights.
        TargetError: there is no such checkpoint, or it cannot be read.
    """
    path, revision = located(name, options)
    if path.is_file():
        yield _from_gguf(path, name, options)
        return
    refuse_adapter(path)
    check_carried(path)
    with opened(path, allow_pickle=options.allow_pickle) as source:
        yield build(path, name, revision, source, options, scratch), source


def located(name: str, options: TargetOptions) -> tuple[Path, str | None]:
    """Where a checkpoint lies, fetched before where the hub has it, and its revision there."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix.lower() == ".gguf":
        options.refuse("the checkpoint is no hub id", "revision")
        if not path.exists():
            raise CheckpointError(f"no such file: {name}", expected="a checkpoint folder, hub id or .gguf file")
        return path, None
    if HUB_ID.fullmatch(name) and not path.exists():
        folder = whole_repository(name, options)
        return folder, folder.name
    found = "a file" if path.exists() else f"nothing at {path.absolute()}"
    raise CheckpointError(f"no checkpoint: {name}", expected="a folder, a hub id or a .gguf file", found=found)


def _forget_quantisation(model: Any) -> None:
    """The weights are plain numbers now: transformers would train, save or load nothing that says otherwise."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    model.config.architectures = model.config.architectures or [type(model).__name__]


def _from_gguf(path: Path, name: str, options: TargetOptions) -> tuple[Subject, Opened]:
    """Weights turned back into floats, in memory; they become one file of safetensors."""
    built = load_gguf(path, options, name)
    refuse_incomplete(path, built)
    model: Any = built.model.eval()
    _forget_quantisation(model)
    tensors = {key: tensor.detach() for key, tensor in model.state_dict(keep_vars=True).items()}
    kept = {key: tensor for key, tensor in tensors.items() if key not in getattr(model, "all_tied_weights_keys", {})}
    dtypes = {key: name_of(tensor.dtype) for key, tensor in kept.items()}
    source = Opened(path.parent, (path,), kept, {SAFE: tuple(kept)}, dtypes, {"format": "pt"}, safe=False)
    subject = Subject(path, name, None, model, model.config.to_dict(), built.tokenizer, notes=built.notes)
    return subject, source
