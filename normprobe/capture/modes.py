"""The base of every mode that sees operations."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch's compiler does not guard: to guard one loads the compiler, a second, and costs every operation
    a detour. Compiled functions run as they were written while a model is watched, so there is nothing to guard."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
