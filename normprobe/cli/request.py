"""What one audit was asked for, with every option at its default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normprobe.checks import load_settings, matching, placed, refuse_none
from normprobe.cli import options as opt
from normprobe.errors import SettingError
from normprobe.records import Level, Settings

if TYPE_CHECKING:
    from normprobe.targets import TargetOptions


@dataclass(frozen=True)
class Request:
    """The options of `normprobe audit`, in the order in which its help shows them."""

    target: opt.Target
    revision: opt.Revision = None
    config_only: opt.ConfigOnly = False
    meta: opt.Meta = False
    device: opt.Device = "cpu"
    dtype: opt.Dtype = None
    allow_pickle: opt.AllowPickle = False
    trust_remote_code: opt.TrustRemoteCode = False
    text: opt.TextOption = None
    text_file: opt.TextFile = None
    tokens: opt.Tokens = None
    batch: opt.Batch = 1
    seed: opt.Seed = 0
    level: opt.LevelOption = opt.LevelChoice.FORWARD
    backward: opt.Backward = False
    lr: opt.LearningRate = None
    optimizer: opt.OptimizerOption = None
    measures: opt.Measures = None
    deep: opt.Deep = False
    exact: opt.Exact = False
    autocast: opt.Autocast = None
    select: opt.Select = None
    ignore: opt.Ignore = None
    fail_on: opt.FailOption = None
    baseline: opt.BaselineOption = None
    write_baseline: opt.WriteBaseline = None
    config: opt.Config = None
    isolated: opt.Isolated = False
    format: opt.FormatOption = None
    out: opt.Out = None
    debug: opt.Debug = False
    quiet: opt.Quiet = False

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
        return _words(self.measures or ())

    def settings(self) -> Settings:
        """What to judge by: the file's settings, and over them what the command line says.

        Raises:
            SettingError: the file cannot be read, the file or an option names what does not exist, or no check of
                one model is left, by which any would be clean.
        """
        known = known_settings(self.config, self.fail_on, isolated=self.isolated)
        given: dict[str, Any] = {}
        if self.select is not None:
            given = {"select": _checks(self.select, "--select"), "ignore": ()}
        if self.ignore is not None:
            given["ignore"] = (*given.get("ignore", known.ignore), *_checks(self.ignore, "--ignore"))
        judge_by = known.model_copy(update=given)
        refuse_none(judge_by, sweep=False)
        return judge_by

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


def known_settings(config: Path | None, fail_on: opt.FailChoice | None, *, isolated: bool) -> Settings:
    """The settings of the file, and over them from which severity on a run fails.

    Raises:
        SettingError: the file cannot be read, or names what does not exist.
    """
    if config is not None and isolated:
        raise SettingError("--config and --isolated exclude each other", hint="leave one of them out")
    known = Settings() if isolated else load_settings(config)
    return known if fail_on is None else known.model_copy(update={"fail_on": fail_on.value})


def _words(texts: Iterable[str]) -> tuple[str, ...]:
    """The words of an option that was given once or several times."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())


def _checks(texts: Sequence[str], option: str) -> tuple[str, ...]:
    """The words of an option that names checks."""
    words = _words(texts)
    with placed(option):
        if not words:
            found = ", ".join(map(repr, texts))
            raise SettingError("no check is named", expected="such as NP201, NP2 or missing-final-norm", found=found)
        for word in words:
            matching(word)
    return words
