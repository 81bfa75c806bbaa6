"""The options of the commands: names, help texts and choices."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from normprobe.records.extras import EXTRA_NAMES
from normprobe.report.formats import Format

_WHAT, _RUN, _JUDGE, _SHOW = "What to load", "What to measure", "What to judge by", "What to show"


class LevelChoice(str, Enum):
    """How far an audit goes."""

    STRUCTURE = "structure"
    FORWARD = "forward"


class FailChoice(str, Enum):
    """From which severity on the exit code is 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"


class DtypeChoice(str, Enum):
    """Floating dtypes that a model can be run in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class AutocastChoice(str, Enum):
    """Dtypes for automatic mixed precision."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class OptimizerChoice(str, Enum):
    """What takes the steps of a sweep."""

    ADAM = "adam"
    SGD = "sgd"


class TableChoice(str, Enum):
    """How the list of checks is printed."""

    RICH = "rich"
    JSON = "json"


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A hub id (org/name), a checkpoint folder, a config.json, a .gguf file, path/file.py:factory, "
        "package.module:factory, or with --config-only a model type (gpt2).",
        show_default=False,
    ),
]
SizedTarget = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A configuration (hub id, checkpoint folder, config.json, or a model type such as gpt2), or a factory "
        "that takes the size: path/file.py:factory, package.module:factory.",
        show_default=False,
    ),
]
Revision = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Branch, tag or commit of a hub repository.", rich_help_panel=_WHAT, show_default=False),
]
ConfigOnly = Annotated[
    bool, typer.Option("--config-only", help="Random weights from the configuration.", rich_help_panel=_WHAT)
]
Meta = Annotated[bool, typer.Option("--meta", help="Shapes without memory: no weights at all.", rich_help_panel=_WHAT)]
Device = Annotated[str, typer.Option(help="Device of the model, such as cuda:0.", rich_help_panel=_WHAT)]
Dtype = Annotated[
    Optional[DtypeChoice],  # noqa: UP045
    typer.Option(help="Dtype of the weights; as saved by default.", rich_help_panel=_WHAT, show_default=False),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read pickled weights (tensors only).", rich_help_panel=_WHAT),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.", rich_help_panel=_WHAT),
]
TextOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--text", help="Text for a language model.", rich_help_panel=_RUN, show_default=False),
]
TextFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="File with text for a language model.", rich_help_panel=_RUN, show_default=False),
]
Tokens = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Tokens in each row; 512 by default.", rich_help_panel=_RUN, show_default=False),
]
Batch = Annotated[int, typer.Option(help="Rows.", rich_help_panel=_RUN)]
Exact = Annotated[
    bool, typer.Option("--exact", help="All query rows of attention, not a sample; no pass more.", rich_help_panel=_RUN)
]
Seed = Annotated[int, typer.Option(help="Seed of random weights, inputs and samples.", rich_help_panel=_RUN)]
LevelOption = Annotated[
    LevelChoice,
    typer.Option(help="structure: what it is built of. forward: and its signal.", rich_help_panel=_RUN),
]
Backward = Annotated[
    bool, typer.Option("--backward", help="And its gradients: one forward and one backward more.", rich_help_panel=_RUN)
]
LearningRate = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--lr", help="With --backward: step against weights.", rich_help_panel=_RUN, show_default=False),
]
OptimizerOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--optimizer",
        help="Optimiser whose steps are judged: path/file.py:factory or package.module:factory, called with the model, "
        "or a class such as torch.optim:AdamW.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]
SweepOptimizer = Annotated[
    OptimizerChoice, typer.Option("--optimizer", help="What takes the steps; muP has other rates for each.")
]
Measures = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help=f"Further measures, with commas between them: {', '.join(EXTRA_NAMES)}. "
        "`normprobe explain measures` tells how many passes each takes.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="All further measures; for their passes: explain measures.", rich_help_panel=_RUN),
]
Autocast = Annotated[
    Optional[AutocastChoice],  # noqa: UP045
    typer.Option(help="Measure under automatic mixed precision.", rich_help_panel=_RUN, show_default=False),
]
TableOption = Annotated[TableChoice, typer.Option("--format", help="Form of the answer.")]
FormatOption = Annotated[
    Optional[Format],  # noqa: UP045
    typer.Option(
        "--format",
        help="Form of the report; rich by default, or what the suffix of --out names.",
        rich_help_panel=_SHOW,
        show_default=False,
    ),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Write the report to this file, whole or not at all.", rich_help_panel=_SHOW, show_default=False),
]
Select = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help="Only these checks: codes, names or the start of codes (NP2), in one option or several. "
        "In place of select and ignore of the settings.",
        rich_help_panel=_JUDGE,
        show_default=False,
    ),
]
Ignore = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Not these checks, beside those of the settings.", rich_help_panel=_JUDGE, show_default=False),
]
FailOption = Annotated[
    Optional[FailChoice],  # noqa: UP045
    typer.Option(
        help="Exit with 1 from this severity on; error where the settings say nothing.",
        rich_help_panel=_JUDGE,
        show_default=False,
    ),
]
Config = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="File with settings; by default normprobe.toml, or pyproject.toml with a table tool.normprobe, in this "
        "folder or the nearest above it.",
        rich_help_panel=_JUDGE,
        show_default=False,
    ),
]
Isolated = Annotated[bool, typer.Option("--isolated", help="No file with settings.", rich_help_panel=_JUDGE)]
BaselineOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--baseline",
        help="File with known findings: only others fail the run.",
        rich_help_panel=_JUDGE,
        show_default=False,
    ),
]
WriteBaseline = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="Write all findings to this file; without --baseline they are known from now on.",
        rich_help_panel=_JUDGE,
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_SHOW)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_SHOW)]
