"""Inputs for a loaded model: text through its own tokenizer, else what its configuration asks for."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.checkpoints.names import plural
from normprobe.errors import InputError
from normprobe.inputs import capped, complete, inputs_from_config, row_length, takes_ids
from normprobe.targets.options import TargetOptions
from normprobe.targets.quiet import quiet


def make_inputs(
    model: nn.Module, tokenizer: Any | None, options: TargetOptions
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Keyword arguments of one forward, words for them, and notes.

    Raises:
        InputError: the model says too little, or a text was asked for that cannot be used.
    """
    asked = options.text is not None or options.text_file is not None
    with quiet():
        if not takes_ids(model):
            if asked:
                raise InputError("a text was given, but the model takes none", hint="leave --text away")
            made = inputs_from_config(model, options.batch, options.seed, options.tokens)
            return *made, (made[1],)
        if tokenizer is None:
            if asked:
                raise InputError(
                    "a text was given, but the model has no tokenizer",
                    hint="leave --text away for seeded random ids, or name a folder with a tokenizer",
                )
            made = inputs_from_config(model, options.batch, options.seed, options.tokens)
            return *made, (f"{made[1]}: no tokenizer",)
        return _from_text(model, tokenizer, options, asked)


def check_text_file(options: TargetOptions) -> None:
    """Say before the work that the text file is not there.

    Raises:
        InputError: it is not.
    """
    if options.text_file is not None:
        path = Path(options.text_file)
        if not path.exists() or path.is_dir():  # a pipe is as good as a file
            found = "a folder" if path.is_dir() else f"nothing at {path.absolute()}"
            raise InputError(f"{options.text_file}: no such text file", expected="a file", found=found)


def _from_text(
    model: nn.Module, tokenizer: Any, options: TargetOptions, asked: bool
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    text, what = _text(options)
    length = row_length(model, options.tokens)
    ids = text_rows(tokenizer, text, options.batch, length)
    rows = _embedding_rows(model)
    if rows is not None and int(ids.max()) >= rows:
        reason = f"the tokenizer gives ids up to {int(ids.max())}, the model has {rows} embeddings"
        if asked:
            raise InputError(f"the text cannot be used: {reason}", hint="leave --text away for seeded ids")
        made = inputs_from_config(model, options.batch, options.seed, options.tokens)
        return *made, (f"{made[1]}: {reason}",)
    words = f"{what}, {_count(options.batch, ids.shape[1])}{_fewer(ids.shape[1], length, options.tokens)}"
    inputs, described = complete(model, ids, words, batch=options.batch, seed=options.seed, tokens=options.tokens)
    return inputs, described, (described,)


def _fewer(given: int, length: int, tokens: int | None) -> str:
    """Words for rows of fewer tokens than were asked for: the text ends, or the model takes no more."""
    if tokens is not None and given < length:
        return f", {given} of {tokens} tokens asked for (the text has no more)"
    return capped(length, tokens)


def _count(batch: int, length: int) -> str:
    return plural(length, "token") if batch == 1 else f"{batch} rows of {plural(length, 'token')}"


def _embedding_rows(model: nn.Module) -> int | None:
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if callable(getter) else None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _text(options: TargetOptions) -> tuple[str, str]:
    if options.text is not None:
        return options.text, "the given text"
    if options.text_file is not None:
        path = Path(options.text_file)
        try:
            return path.read_text(encoding="utf-8"), f"text of {path.name}"
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read as text", found=str(error)) from error
    return sample_text(), "bundled sample text"


def sample_text() -> str:
    """The bundled English prose, some 1,500 words."""
    return importlib.resources.files("normprobe.targets").joinpath("sample.txt").read_text(encoding="utf-8")


def text_rows(tokenizer: Any, text: str, batch: int, length: int) -> Tensor:
    """Ids (B, T), int64: consecutive pieces of the text, each with the tokenizer's own special ids around it.

    T is `length`, or less where the text is shorter. A text too short for all rows starts again.

    Raises:
        InputError: the text has no tokens.
    """
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not bare:
        raise InputError("the text has no tokens", found=plural(len(text), "character"))
    before, after = _around(bare, list(tokenizer(text)["input_ids"]))
    if length <= len(before) + len(after):
        before, after = [], []  # no room for them and the text
    room = min(length - len(before) - len(after), len(bare))
    rows = []
    for row in range(batch):
        content = [bare[(row * room + i) % len(bare)] for i in range(room)]
        rows.append(before + content + after)
    return torch.tensor(rows)


def _around(bare: list[int], full: list[int]) -> tuple[list[int], list[int]]:
    """The special ids that the tokenizer puts before and after a text; none where other ids differ."""
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []
