"""How a parameter depends on the width of its model, and what that asks of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normprobe.records.sweep import Optimizer

Role = Literal["hidden", "readout", "input", "fixed", "shared", "unknown"]


@dataclass(frozen=True)
class Place:
    """How a parameter depends on the width.

    Attributes:
        role: "hidden": from features of the width to such features. "readout": from such features to a fixed number.
            "input": from a fixed number to the width, as embeddings, gains and biases. "fixed": no axis grows.
            "shared": one parameter in the roles of input and readout (tied embeddings). "unknown": see `why`.
        ratio: fan-in over that of the base, 1 where the fan-in does not grow; of a shared one that of the readout.
        fan_out: fan-out over that of the base, 1 where it does not grow; of a shared one that of the input.
        multiplied: of a readout, whether the model divides what it reads by `ratio`; a shared one has to.
        why: what could not be told, or what is to be heeded.
        readout: the module in which it is a readout.
    """

    role: Role
    ratio: float = 1.0
    fan_out: float = 1.0
    multiplied: bool = False
    why: str = ""
    readout: str = ""

    def rate(self, optimizer: Optimizer) -> float:
        """The learning rate over that of the base.

        Adam: 1 / fan-in for hidden weights and readouts, SGD: fan-out for inputs and biases, 1 / fan-in for readouts,
        fan-out / fan-in, which is 1, for hidden weights (Yang et al. 2022, table 3). Of a readout with a multiplier
        Adam: 1, SGD: fan-in (table 8).
        """
        if self.role == "hidden":
            return 1 / self.ratio if optimizer == "adam" else self.fan_out / self.ratio
        if self.role == "shared" or (self.role == "readout" and self.multiplied):
            return 1.0 if optimizer == "adam" else self.ratio
        if self.role == "readout":
            return 1 / self.ratio
        return self.fan_out if self.role == "input" and optimizer == "sgd" else 1.0
