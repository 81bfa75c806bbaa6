"""Interrupts while libraries load: some of them swallow the exception, and the command would run on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_CURSOR = "\r\x1b[K\x1b[?25h"  # clears the line of a progress bar, and shows the cursor that it hid


@contextmanager
def at_once() -> Iterator[None]:
    """An interrupt inside ends the process with 130 there and then; nothing may be half written inside.

    Outside the main thread, and where someone else handles interrupts already, nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    clear = _CURSOR if sys.__stderr__ is not None and sys.__stderr__.isatty() else ""
    try:
        os.write(2, f"{clear}interrupted\n".encode())
    finally:
        os._exit(INTERRUPTED)
