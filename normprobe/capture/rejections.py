"""What a forward raises on the inputs that it was given, as an error that names the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from normprobe.capture.shadows import on_meta
from normprobe.errors import InputError, NormprobeError

_NO_VALUES = "; on the meta device it may also miss values that neither inputs nor constants decide"


@contextmanager
def rejections(model: nn.Module) -> Iterator[None]:
    """Say which model failed on its inputs, and keep its own error as the cause.

    Raises:
        InputError: what runs inside raised anything but an error of normprobe's own.
    """
    try:
        yield
    except NormprobeError:
        raise
    except Exception as error:
        raise InputError(
            f"the forward of {type(model).__name__} raised",
            found=f"{type(error).__name__}: {error}",
            hint="check that the inputs fit the model" + (_NO_VALUES if on_meta(model) else ""),
        ) from error
