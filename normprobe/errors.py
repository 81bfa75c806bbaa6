"""Errors that a user can act on. Each names the place, what was expected, what was found and the next step."""

from __future__ import annotations

from typing import final


class NormprobeError(Exception):
    """Base of every error that normprobe raises on purpose; the command line turns it into exit code 2.

    Args:
        message: what went wrong and where, in one line.
        expected: what was expected there.
        found: what was found instead.
        hint: the next step, a command or an argument.
    """

    def __init__(
        self,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.expected, self.found, self.hint = message, expected, found, hint
        super().__init__(self.describe())

    def describe(self) -> str:
        """The message with one indented line each for `expected`, `found` and `hint` where they are known."""
        rows = (("expected", self.expected), ("found", self.found), ("try", self.hint))
        return "\n".join([self.message, *(f"  {label}: {text}" for label, text in rows if text)])


@final
class TargetError(NormprobeError):
    """The named target could not be turned into a model (wrong name, broken file, refused code)."""


@final
class InputError(NormprobeError):
    """No inputs could be made for the model, or the model rejected them."""


@final
class UnreadableAnatomyError(NormprobeError):
    """The data flow of the model could not be read."""


@final
class RewriteError(NormprobeError):
    """A rewrite found another number of sites than it stated, or could not prove what it did."""


@final
class SettingError(NormprobeError):
    """An option or setting has a value that normprobe does not know."""


@final
class CheckpointError(NormprobeError):
    """A checkpoint cannot be read or written; what was there before is as it was."""
