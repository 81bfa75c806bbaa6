"""One set of arguments, chosen among the candidates by running them on a twin without weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.errors import InputError
from normprobe.inputs.candidates import candidates
from normprobe.inputs.face import Face
from normprobe.inputs.fields import number, special_ids, text_part

TOKENS = 512
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
Choice = tuple[dict[str, Tensor], str]


def inputs_from_config(
    model: nn.Module, batch: int = 1, seed: int = 0, tokens: int | None = None
) -> tuple[dict[str, Tensor], str]:
    """Seeded random inputs of the shapes and ranges that the model's configuration asks for.

    Language models get ids drawn evenly from the vocabulary without special ids; images and audio are
    standard normal noise. What a model takes is read from its forward's signature, its `main_input_name` and
    its configuration's fields. Where these leave a choice, the candidates are run on a twin on meta.

    Args:
        model: a live model; wrappers around it (DataParallel, PEFT, compiled) are looked through.
        batch: number of rows.
        seed: seed of the generator; the random state of the process is left alone.
        tokens: length of each row for a language model, capped by the model; None for 512.

    Returns:
        Keyword arguments of one forward, and words that say what they are. Tensors are on the device of the
        model's first parameter; floating-point ones have its dtype.

    Raises:
        InputError: the configuration says too little to make inputs.
    """
    if not takes_ids(model):
        return complete(model, None, "", batch=batch, seed=seed, tokens=tokens)
    length = row_length(model, tokens)
    ids = random_ids(Face.of(model), batch, length, seed)
    words = f"seeded random ids, {batch}x{length}{capped(length, tokens)}"
    return complete(model, ids, words, batch=batch, seed=seed, tokens=tokens)


def takes_ids(model: nn.Module) -> bool:
    """Whether the model's forward takes `input_ids`.

    Raises:
        InputError: no module of the model has a configuration.
    """
    return "input_ids" in Face.of(model).parameters


def complete(
    model: nn.Module, ids: Tensor | None, words: str, *, batch: int, seed: int, tokens: int | None = None
) -> tuple[dict[str, Tensor], str]:
    """The arguments of one forward around `ids` (B, T), int64, None for a model that takes none.

    `words` describes the ids. Returns and raises as `inputs_from_config`.
    """
    face = Face.of(model)
    found = list(candidates(face, ids, batch, seed))
    if not found:
        raise face.too_little("what it takes: text, image or audio")
    choices = [(args | _decoder(face, args, batch, seed, tokens), text) for args, text in found]
    choices = [(args, text) for args, text in choices if face.required <= set(args)]
    if not choices:
        raise face.too_little(f"what to pass as {', '.join(sorted(face.required))}")
    args, text = choices[0] if len(choices) == 1 else _first_that_runs(face, choices)
    described = "; ".join(part for part in (words if "input_ids" in args else "", text) if part)
    return _placed(model, args), described


def row_length(model: nn.Module, tokens: int | None) -> int:
    """Tokens in one row: as asked, else 512, and never more than the model has positions for."""
    config = text_part(Face.of(model).config)
    limits = _limits(config, POSITIONS)
    for module in model.modules() if limits else ():
        # A position table with a padding row counts its positions from the row after it.
        if isinstance(module, nn.Embedding) and module.num_embeddings == min(limits):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - unused)
    return max(1, min([TOKENS if tokens is None else tokens, *limits]))


def capped(length: int, tokens: int | None) -> str:
    """Words for rows of fewer tokens than were asked for; empty where they have as many."""
    return f", {length} of {tokens} tokens asked for (the model's maximum)" if tokens and length < tokens else ""


def _limits(config: Any, names: tuple[str, ...]) -> list[int]:
    return [value for name in names if (value := number(config, (name,))) is not None]


def random_ids(face: Face, batch: int, length: int, seed: int) -> Tensor:
    """Ids (B, T), int64, drawn evenly from the vocabulary without its special ids.

    Raises:
        InputError: neither the configuration nor the embedding says how large the vocabulary is.
    """
    size, special = face.vocabulary(), special_ids(face.config)
    allowed = torch.tensor([i for i in range(size) if i not in special] or list(range(size)))
    generator = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (batch, length), generator=generator)]


def _decoder(face: Face, args: dict[str, Tensor], batch: int, seed: int, tokens: int | None) -> dict[str, Tensor]:
    """`decoder_input_ids` of an encoder-decoder: the ids shifted right, else seeded ones after the start."""
    if "decoder_input_ids" not in face.parameters or not getattr(face.config, "is_encoder_decoder", False):
        return {}
    config = text_part(face.config)
    wanted = TOKENS if tokens is None else tokens
    length = min([wanted, *_limits(config, (*POSITIONS, "max_target_positions"))])
    ids = args["input_ids"] if "input_ids" in args else random_ids(face, batch, length, seed)
    start = next(
        (
            value
            for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id")
            if isinstance(value := getattr(face.config, name, None), int)
        ),
        0,
    )
    return {"decoder_input_ids": torch.cat([torch.full((batch, 1), start), ids[:, : length - 1]], dim=1)}


def _first_that_runs(face: Face, choices: Sequence[Choice]) -> Choice:
    """The first choice that runs on the twin, else the first that could not be tried, else an error."""
    twin = _twin(face)
    if isinstance(twin, str):
        args, words = choices[0]
        return args, "; ".join(part for part in (words, f"not tried: no twin on the meta device ({twin})") if part)
    untried = None
    reasons: dict[str, None] = {}
    for dtype in (None, torch.bfloat16):  # some kernels for experts run in half precision alone
        twin = twin.to(dtype=dtype)
        for args, words in choices:
            reason = _reason(twin, args)
            if reason is None:
                return args, words
            if _says_meta(reason):
                untried = untried or (args, words)
            reasons[f"{', '.join(args)}: {reason}"] = None
    if untried is not None:
        return untried
    raise InputError(
        f"{type(face.module).__name__}: no inputs were given and none of those tried fit",
        found=" | ".join(list(reasons)[:4]),
        hint="pass inputs: a tensor, a tuple or a dict; in a factory, return (model, inputs)",
    )


def _says_meta(reason: str) -> bool:
    """Whether the twin failed for being on meta, which tells nothing about the inputs."""
    about_device = reason.startswith("RuntimeError") and "same device" in reason
    return about_device or "meta" in reason.lower()


def _twin(face: Face) -> nn.Module | str:
    """The same class built from a copy of the configuration on meta, or the reason why that cannot be done."""
    build: Any = type(face.module)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            twin: nn.Module = build(copy.deepcopy(face.config))
    except Exception as error:  # a class may need more than its configuration; the caller says why none was tried
        return _first_line(error)
    return twin.to("meta").eval()  # some constructors put a tensor on the CPU all the same


def _reason(twin: nn.Module, args: dict[str, Tensor]) -> str | None:
    """Why the twin does not run on `args`; None where it does."""
    dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
    on_meta = {key: value.to("meta", dtype if value.is_floating_point() else None) for key, value in args.items()}
    try:
        with torch.no_grad():
            twin(**on_meta)
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _placed(model: nn.Module, args: dict[str, Tensor]) -> dict[str, Tensor]:
    parameter = next(model.parameters(), torch.empty(0))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        key: value.to(parameter.device, dtype if value.is_floating_point() else None) for key, value in args.items()
    }
