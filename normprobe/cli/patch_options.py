"""The options of `normprobe patch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from normprobe.cli import options as opt

_NORMS, _SIGNAL, _ANY, _OUT = "Norms", "Weights, branches and attention", "Any rewrite", "The new folder"

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A folder, a hub id or a .gguf file.", show_default=False)
]
OutFolder = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="OUT", help="The new folder; not with --plan and --verify.", show_default=False),
]
UpcastNorms = Annotated[
    bool, typer.Option("--upcast-norms", help="Norms take their statistic in float32.", rich_help_panel=_NORMS)
]
Eps = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Eps of all norms, inside the root.", rich_help_panel=_NORMS, show_default=False),
]
Swap = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        metavar="FROM:TO",
        help="layernorm:rmsnorm, norm:dyt, batchnorm:groupnorm, batchnorm:frozen, pre:post, …",
        rich_help_panel=_NORMS,
        show_default=False,
    ),
]
FoldNorms = Annotated[
    bool,
    typer.Option("--fold-norms", help="Gains and offsets go into the weights that read them.", rich_help_panel=_NORMS),
]
FinalNorm = Annotated[
    bool, typer.Option("--final-norm", help="Add a final norm where one is missing.", rich_help_panel=_NORMS)
]
OutputNorms = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="START",
        help="Norm what branches write; gains: unit or calibrated.",
        rich_help_panel=_NORMS,
        show_default=False,
    ),
]
QKNorm = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="START[:KIND][:shared]",
        help="Norm queries and keys; gains: unit, calibrated or distilled; kind: rmsnorm, l2norm or layernorm; shared: "
        "one gain for all heads.",
        rich_help_panel=_SIGNAL,
        show_default=False,
    ),
]
QKClip = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        metavar="LIMIT",
        help="Scale heads down whose largest logit exceeds it.",
        rich_help_panel=_SIGNAL,
        show_default=False,
    ),
]
Residual = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="KIND",
        help="A factor on branches: constant, layerscale, rezero, skipinit or deepnorm.",
        rich_help_panel=_SIGNAL,
        show_default=False,
    ),
]
Init = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SCHEME",
        help="Draw weights anew: gpt2, xavier, … (normprobe explain Initialise).",
        rich_help_panel=_SIGNAL,
        show_default=False,
    ),
]
InitSeed = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Seed of --init; 0 by default.", rich_help_panel=_SIGNAL, show_default=False),
]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help="Places of the one rewrite that is named: a pattern of paths, or a role of --init (writers).",
        rich_help_panel=_ANY,
        show_default=False,
    ),
]
ByName = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--rewrite",
        metavar="NAME",
        help="Any by name and settings: ToDyT, 'SetEps(eps=1e-5)' (normprobe explain NAME).",
        rich_help_panel=_ANY,
        show_default=False,
    ),
]
Recipe = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help=r"A TOML file of \[\[rewrite]] tables, in order.", rich_help_panel=_ANY, show_default=False),
]
Mend = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="EFFECT",
        help="Apply what the findings name, as far as exact, calibrated or breaking.",
        rich_help_panel=_ANY,
        show_default=False,
    ),
]
AsType = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--as",
        metavar="MODEL_TYPE",
        help="Write it as another architecture that computes the same: qwen3, mistral, …",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
PlanOnly = Annotated[
    bool, typer.Option("--plan", help="Say what would change, and write nothing.", rich_help_panel=_OUT)
]
Verify = Annotated[bool, typer.Option("--verify", help="Check a folder that this command wrote.", rich_help_panel=_OUT)]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="OUT may take the place of a folder, whatever it holds.", rich_help_panel=_OUT),
]
MaxShardSize = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SIZE",
        help="Of a weight file, such as 2GB; as in CHECKPOINT by default.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
NoAudit = Annotated[bool, typer.Option("--no-audit", help="No audit before and after.", rich_help_panel=_OUT)]


@dataclass(frozen=True)
class PatchRequest:
    """The options of `normprobe patch`, in the order in which its help shows them."""

    context: typer.Context
    checkpoint: Checkpoint
    out: OutFolder = None
    upcast_norms: UpcastNorms = False
    eps: Eps = None
    swap: Swap = None
    fold_norms: FoldNorms = False
    final_norm: FinalNorm = False
    output_norms: OutputNorms = None
    qk_norm: QKNorm = None
    qk_clip: QKClip = None
    residual: Residual = None
    init: Init = None
    seed: InitSeed = None
    only: Only = None
    rewrite: ByName = None
    recipe: Recipe = None
    mend: Mend = None
    as_type: AsType = None
    plan: PlanOnly = False
    verify: Verify = False
    overwrite: Overwrite = False
    max_shard_size: MaxShardSize = None
    no_audit: NoAudit = False
    revision: opt.Revision = None
    allow_pickle: opt.AllowPickle = False
    trust_remote_code: opt.TrustRemoteCode = False
    text: opt.TextOption = None
    text_file: opt.TextFile = None
    tokens: opt.Tokens = None
    batch: opt.Batch = 1
    format: opt.TableOption = opt.TableChoice.RICH
    debug: opt.Debug = False
    quiet: opt.Quiet = False
