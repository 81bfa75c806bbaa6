"""What looks on while a forward is recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Onlooker(Protocol):
    """Is asked what a forward runs in, and told what it returned."""

    def beside(self) -> AbstractContextManager[Any]:
        """What the forward runs in, anew where it has to be run again."""

    def gave(self, output: Any) -> None:
        """Is told what the forward returned, before the model is put back as it was."""
