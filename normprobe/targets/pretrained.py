"""Weights from a file into a model of transformers, with everything that did not fit said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from normprobe.checkpoints.names import listed, plural
from normprobe.errors import TargetError
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.place import parse_dtype
from normprobe.targets.quiet import quiet, seeded


def load_pretrained(
    loader: Any, folder: Path | None, config: Any, options: TargetOptions, name: str, source: str, **extra: Any
) -> Built:
    """`loader.from_pretrained(folder, config=config, **extra)` with its loading report turned into notes; without a
    folder `extra` holds a `state_dict`.

    Weights that the files lack are initialised under `options.seed`.

    Raises:
        TargetError: transformers cannot load it, tensors have other shapes than the configuration says, or
            none of the model's tensors is in the files.
    """
    dtype: Any = parse_dtype(options.dtype) or "auto"
    try:
        with quiet(), seeded(options.seed):
            model, report = loader.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **extra,
            )
    except Exception as error:
        raise TargetError(
            f"{name}: transformers cannot load this checkpoint",
            found=f"{type(error).__name__}: {error}",
        ) from error
    _check_shapes(name, report, options)
    missing, unexpected = (tuple(sorted(report[key])) for key in ("missing_keys", "unexpected_keys"))
    _check_any_loaded(name, model, missing, unexpected)
    return Built(
        model,
        source,
        notes=_notes(missing, unexpected, len(model.state_dict()), options.seed),
        missing=missing,
        unexpected=unexpected,
    )


def _check_shapes(name: str, report: dict[str, Any], options: TargetOptions) -> None:
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        key, found, expected = mismatched[0]
        raise TargetError(
            f"{name}: {plural(len(mismatched), 'tensor')} with another shape than the configuration says, first {key}",
            expected=str(tuple(expected)),
            found=str(tuple(found)),
            hint=options.hint("config.json and weights are of different models", "--config-only for random weights"),
        )


def _check_any_loaded(name: str, model: nn.Module, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> None:
    parameters = {key for key, _ in model.named_parameters()}
    if parameters and parameters <= set(missing):
        raise TargetError(
            f"{name}: none of the {len(parameters)} parameters of {type(model).__name__} is in the files",
            expected=listed(tuple(sorted(parameters))),
            found=listed(unexpected) or "no tensors",
            hint="config.json and weights are of different models",
        )


def _notes(missing: tuple[str, ...], unexpected: tuple[str, ...], tensors: int, seed: int) -> tuple[str, ...]:
    notes = []
    if missing:
        notes.append(
            f"{len(missing)} of {plural(tensors, 'tensor')} not in the checkpoint: newly initialised "
            f"(seed {seed}), {listed(missing)}"
        )
    if unexpected:
        notes.append(f"{plural(len(unexpected), 'tensor')} of the checkpoint not used: {listed(unexpected)}")
    return tuple(notes)
