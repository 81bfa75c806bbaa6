"""What one audit was asked for, with every option at its default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normprobe.cli import options as opt
from normprobe.errors import SettingError
from normprobe.records import Level
from normprobe.report.formats import Format

if TYPE_CHECKING:
    from normprobe.targets import TargetOptions


@dataclass(frozen=True)
class Request:
    """The options of `normprobe audit`, by their names on the command line."""

    target: str
    revision: str | None = None
    config_only: bool = False
    meta: bool = False
    device: str = "cpu"
    dtype: opt.DtypeChoice | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    text: str | None = None
    text_file: Path | None = None
    tokens: int | None = None
    batch: int = 1
    seed: int = 0
    level: opt.LevelChoice = opt.LevelChoice.FORWARD
    backward: bool = False
    lr: float | None = None
    measures: str | None = None
    deep: bool = False
    exact: bool = False
    autocast: opt.AutocastChoice | None = None
    format: Format | None = None
    out: Path | None = None
    fail_on: opt.FailChoice = opt.FailChoice.ERROR
    debug: bool = False
    quiet: bool = False

    def depth(self) -> Level:
        """The level of the probe.

        Raises:
            SettingError: an option was given without the level or the weights that it needs.
        """
        self._check_signal()
        if not self.backward:
            if self.lr is not None:
                raise SettingError("--lr needs gradients", expected="--backward", hint="add --backward")
            return self.level.value
        if self.meta:
            found = "--meta, which loads no weights"
            raise SettingError(
                "--backward needs weights", expected="a model with weights", found=found, hint="leave one of them out"
            )
        if self.level is opt.LevelChoice.STRUCTURE:
            raise SettingError("--backward and --level structure exclude each other", hint="leave one of them out")
        return "backward"

    def _check_signal(self) -> None:
        """Refuse options that ask for numbers where none are measured."""
        asked = {"--deep": self.deep, "--measures": self.measures is not None, "--exact": self.exact}
        for option in (name for name, given in asked.items() if given):
            if self.meta:
                found = "--meta, which loads no weights"
                raise SettingError(f"{option} needs weights", expected="a model with weights", found=found)
            if self.level is opt.LevelChoice.STRUCTURE and not self.backward:
                raise SettingError(f"{option} needs a signal", expected="--level forward", found="--level structure")

    def extras(self) -> tuple[str, ...]:
        """The names of the further measures; `probe` refuses unknown ones."""
        if self.deep:
            return ("all",)
        return tuple(name.strip() for name in (self.measures or "").split(",") if name.strip())

    def loading(self) -> TargetOptions:
        """How to load the target.

        Raises:
            SettingError: a number is out of range, or two options exclude each other.
        """
        from normprobe.targets import TargetOptions

        return TargetOptions(
            revision=self.revision,
            config_only=self.config_only,
            meta=self.meta,
            device=self.device,
            dtype=self.dtype.value if self.dtype else None,
            allow_pickle=self.allow_pickle,
            trust_remote_code=self.trust_remote_code,
            text=self.text,
            text_file=str(self.text_file) if self.text_file else None,
            tokens=self.tokens,
            batch=self.batch,
            seed=self.seed,
        )
