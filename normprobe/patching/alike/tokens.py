"""Does the tokeniser of a new folder still give the tokens that that of the source gave?

Which class reads the files of a tokeniser can depend on `model_type`, and so can what that class makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normprobe.errors import CheckpointError
from normprobe.targets.tokenizers import read_tokenizer

_TEXTS = (
    "The norms of 12,345 layers don't add up: 3.14159 × 2 = 6.28318!",
    "  Two spaces,\n\n\ttabs and new lines\r\n  def f(x):\n        return x**2  # code",
    "Straße, naïve café, İstanbul; Привет, мир; 你好 世界。こんにちは 안녕하세요; नमस्ते; שלום; 🙂👩‍👩‍👧",
    "https://example.org/a_b?c=d&e=%20f  I'LL we'Re CamelCaseWords ALLCAPS snake_case 1e-05 0x7fff",
)


def check_tokens(folder: Path, tokenizer: Any | None, *, trust: bool = False) -> None:
    """Compare the tokeniser in `folder` with one that was read before, on texts in several scripts.

    Raises:
        CheckpointError: it gives other tokens, or cannot be read.
    """
    if tokenizer is None:
        return
    found, notes = read_tokenizer(folder, trust)
    for text in _TEXTS:
        had = tokenizer(text)["input_ids"]
        has = None if found is None else found(text)["input_ids"]
        if has != had:
            raise CheckpointError(
                "the tokeniser of the new folder gives other tokens than that of the checkpoint",
                expected=f"{had[:8]} … for {text[:24]!r}",
                found="; ".join(notes) if has is None else f"{has[:8]} … by {type(found).__name__}",
                hint=f'state "tokenizer_class": "{type(tokenizer).__name__}" in tokenizer_config.json',
            )
