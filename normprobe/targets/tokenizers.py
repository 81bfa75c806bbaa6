"""The tokenizer that lies beside a model, if there is one that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normprobe.targets.quiet import quiet

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
)
VOCABULARIES = tuple(name for name in FILES if name.startswith(("tokenizer.", "vocab", "spiece", "sentencepiece")))


def read_tokenizer(folder: Path, trust: bool = False, **extra: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer of a checkpoint folder and a note; None where it has none, or none that can be read.

    A tokenizer is needed for text alone, so a broken one is said and the model is still loaded.
    """
    from transformers import AutoTokenizer

    if not extra and not any((folder / name).is_file() for name in VOCABULARIES):
        return None, ()
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust, **extra)
    except Exception as error:
        return None, (f"tokenizer not readable ({type(error).__name__}: {str(error).splitlines()[0]})",)
    return tokenizer, ()
