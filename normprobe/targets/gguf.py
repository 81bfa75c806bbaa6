"""A .gguf file, read by transformers into float32 weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from normprobe.errors import TargetError
from normprobe.targets.config import build_config
from normprobe.targets.heads import model_class
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.pretrained import load_pretrained
from normprobe.targets.quiet import quiet
from normprobe.targets.tokenizers import read_tokenizer

MAGIC = b"GGUF"
_READERS = ("GGUFReader", "get_tensor_name_map")
_READING = Lock()  # of two at once the later would put back what the earlier keeps


def load_gguf(path: Path, options: TargetOptions, name: str) -> Built:
    """The model in the GGUF file `path`, its quantised tensors turned back into floats.

    Raises:
        TargetError: a package of the extra is missing, the file is broken, or its architecture is one that
            transformers cannot read from GGUF.
    """
    _check_file(path, ("gguf",) if options.config_only or options.meta else ("gguf", "accelerate"))
    with _read_once():
        config = _config(path)
        tokenizer, note = read_tokenizer(path.parent, gguf_file=path.name)
        if options.config_only or options.meta:
            built = build_config(config, options, name, "gguf")
        else:
            kind = model_class(config)
            built = load_pretrained(kind, path.parent, config, options, name, "gguf", gguf_file=path.name)
            note = ("weights de-quantised from GGUF", *note)
    return replace(built, tokenizer=tokenizer, notes=built.notes + note)


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise TargetError(
            f"{path}: transformers cannot read this GGUF file",
            expected="a whole GGUF file of an architecture that transformers converts",
            found=f"{type(error).__name__}: {error}",
        ) from error


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads the header anew for the configuration, the tokenizer and the weights, and the names of all
    tensors for every module: seconds each, of which one is enough."""
    import gguf

    with _READING:
        kept = {name: vars(gguf)[name] for name in _READERS}
        quick = kept | {"GGUFReader": _unmapped(kept["GGUFReader"])}
        vars(gguf).update({name: cache(read) for name, read in quick.items()})
        try:
            yield
        finally:
            vars(gguf).update(kept)


def _unmapped(reader: type[Any]) -> type[Any]:
    """It slices its file a million times, which takes three times as long where the array knows that it is mapped."""
    import numpy

    def data(self: Any) -> Any:
        return vars(self)["data"]

    def set_data(self: Any, mapped: Any) -> None:
        vars(self)["data"] = mapped.view(numpy.ndarray)

    return type(reader.__name__, (reader,), {"data": property(data, set_data)})


def _check_file(path: Path, packages: Sequence[str]) -> None:
    """Refuse what cannot be read, before anything takes time; transformers wants accelerate for the weights alone."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(
            f"{path}: reading GGUF needs the package {' and '.join(missing)}",
            hint="pip install 'normprobe[gguf]', in a clone pip install '.[gguf]'",
        )
    with path.open("rb") as stream:
        head = stream.read(len(MAGIC))
    if head != MAGIC:
        raise TargetError(f"{path}: not a GGUF file", expected=repr(MAGIC), found=repr(head))
