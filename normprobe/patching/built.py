"""The model of a checkpoint whose weights are mapped from the disk, and inputs for one forward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from normprobe.checkpoints.dtypes import FLOATS
from normprobe.checkpoints.names import listed, plural
from normprobe.checkpoints.opened import Opened
from normprobe.errors import CheckpointError
from normprobe.patching.loadable import ADAPTER, base_of_adapter
from normprobe.patching.scratch import Scratch
from normprobe.targets.config import own_code, read_config
from normprobe.targets.heads import class_with_code, model_class
from normprobe.targets.inputs import make_inputs
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.pretrained import load_pretrained
from normprobe.targets.tokenizers import read_tokenizer

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Subject:
    """What is patched.

    Attributes:
        path: the checkpoint folder, or its one file.
        name: as it was given.
        revision: commit of a hub repository.
        model: in eval mode.
        config: its configuration as plain values, as it was read.
        tokenizer: None where it has none.
        inputs: for one forward, once they are made.
        described: what they are.
        notes: what was found on the way.
    """

    path: Path
    name: str
    revision: str | None
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Any | None
    inputs: dict[str, Any] = field(default_factory=dict)
    described: str = ""
    notes: tuple[str, ...] = ()


def build(
    folder: Path, name: str, revision: str | None, source: Opened, options: TargetOptions, scratch: Scratch
) -> Subject:
    """The model in `folder`, without inputs, whose open weights are `source`; what is converted goes to `scratch`.

    Raises:
        CheckpointError: its weights are quantised, or some are missing.
        TargetError: it cannot be built.
    """
    config = read_config(folder / "config.json", options)
    refuse_quantised(folder, source, config)
    options.refuse("a checkpoint is patched in the dtype that most of its weights are stored in", "dtype")
    options = replace(options, dtype=_dtype(source))
    tensors = dict(source.tensors)
    kind = class_with_code(config, folder) if own_code(vars(config)) else model_class(config)
    with scratch.placing(mapped=tensors.values(), spare=source.nbytes):
        built = load_pretrained(kind, None, config, options, name, "folder", state_dict=tensors)
    refuse_incomplete(folder, built)
    model: Any = built.model.eval()
    tokenizer, found = read_tokenizer(folder, trust=options.trust_remote_code)
    notes = (*built.notes, *found)
    return Subject(folder, name, revision, model, model.config.to_dict(), tokenizer, notes=notes)


def with_inputs(subject: Subject, options: TargetOptions) -> Subject:
    """The same with inputs for one forward.

    Raises:
        InputError: none can be made.
    """
    inputs, described, notes = make_inputs(subject.model, subject.tokenizer, options)
    return replace(subject, inputs=inputs, described=described, notes=(*subject.notes, *notes))


def _dtype(source: Opened) -> str:
    """The dtype that most of the weights are in."""
    found = next((dtype for dtype, _ in _counts(source).most_common() if dtype in FLOATS), None)
    if found is None:
        raise CheckpointError(f"{source.folder}: no weight is a plain number", expected=", ".join(sorted(FLOATS)))
    return _DTYPES[found]


def _counts(source: Opened) -> Counter[str]:
    """How many numbers there are of each dtype."""
    counts: Counter[str] = Counter()
    for name, tensor in source.tensors.items():
        counts[source.dtypes[name]] += tensor.numel()
    return counts


def refuse_adapter(folder: Path) -> None:
    """An adapter is no model: what it is added to would change under it.

    Raises:
        CheckpointError: `folder` holds one.
    """
    if (folder / ADAPTER).is_file():
        hint = "merge it first: PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)"
        found = f"an adapter of {base_of_adapter(folder)}, trained on the base as it is"
        raise CheckpointError(f"{folder} is an adapter", expected="a whole model", found=found, hint=hint)


def refuse_incomplete(path: Path, built: Built) -> None:
    """What the files lack was drawn at random, and would come out as if it had been trained.

    Raises:
        CheckpointError: weights of the model are missing.
    """
    if built.missing:
        kind = type(built.model).__name__
        what = f"{path} lacks {plural(len(built.missing), 'tensor')} of a {kind}"
        hint = 'complete the files, or name the class that they are of in config.json, as "architectures": […]'
        raise CheckpointError(what, expected="every weight", found=f"none for {listed(built.missing)}", hint=hint)


def refuse_quantised(folder: Path, source: Opened, config: Any) -> None:
    """A rewrite computes with plain numbers, which quantised weights are not.

    Raises:
        CheckpointError: the configuration says so, or most of the numbers are whole or of eight bits.
    """
    stated = getattr(config, "quantization_config", None)
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    most = next((dtype for dtype, _ in _counts(source).most_common(1)), None)
    if stated is not None or most not in {None, *FLOATS}:
        found = f"quantization_config {method}" if stated is not None else f"weights stored as {most}"
        hint = "patch the checkpoint that it was quantised from, and quantise again"
        expected = f"weights in {', '.join(sorted(FLOATS))}"
        raise CheckpointError(f"{folder} is quantised", expected=expected, found=str(found), hint=hint)
