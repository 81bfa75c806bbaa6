"""The probes after a rewrite: as the report before it was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.capture.invoke import Inputs
from normprobe.probing import probe
from normprobe.records import Finding
from normprobe.records.extras import EXTRA_NAMES
from normprobe.report.report import Report

_TIMED = {"cost": "NP116"}  # times differ from run to run: they are taken anew for findings that stand on them alone


@dataclass(frozen=True)
class Probed:
    """A model, and how its report was made.

    Attributes:
        report: the report before anything was changed.
        loss: whose gradients it has; None for the default.
        optimizer: that it was made with.
    """

    model: nn.Module
    inputs: Inputs
    report: Report
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Optimizer | None = None

    def again(self, meant: tuple[Finding, ...]) -> Report:
        """The report on the model as it is now, for these findings."""
        told = self.report.data
        codes = {finding.code for finding in meant}
        return probe(
            self.model,
            self.inputs,
            level=told.level,
            measures=[name for name in self._measures() if _TIMED.get(name, "") in ("", *codes)],
            loss=self.loss,
            optimizer=self.optimizer,
            autocast=told.target.autocast,
            settings=told.settings,
        )

    def _measures(self) -> list[str]:
        """The further measures that the report has."""
        taken = self.report.data.measurements
        compared = taken.batchnorm is not None and taken.batchnorm.train_eval_gap is not None
        return [name for name in EXTRA_NAMES if (compared if name == "batchnorm" else getattr(taken, name) is not None)]
