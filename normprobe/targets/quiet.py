"""Loading without noise and without a trace: output, warnings and random states are put back."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from logging import CRITICAL
from typing import Any

import torch


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep stdout for the report: what others print goes to stderr; warnings, logs and bars are off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_quiet_transformers())
        stack.enter_context(_no_bars())
        yield


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """No bars of tqdm's own: transformers draws some without asking its own setting."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    original = tqdm.__init__

    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = original


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run under `seed` (torch, random, numpy), and put every random state back afterwards.

    Generators of accelerators are seeded only where they are in use already, so that none is started here.
    """
    numpy = sys.modules.get("numpy")
    state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
