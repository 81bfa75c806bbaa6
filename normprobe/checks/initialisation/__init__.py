"""How weights were drawn (6xx)."""

from normprobe.checks.base import Check
from normprobe.checks.initialisation.blocked_gradient import BlockedGradient
from normprobe.checks.initialisation.constant_weight import ConstantWeight
from normprobe.checks.initialisation.linear_gain_before_relu import LinearGainBeforeReLU
from normprobe.checks.initialisation.recipe_not_applied import RecipeNotApplied
from normprobe.checks.initialisation.unscaled_writers import UnscaledWriters
from normprobe.checks.initialisation.width_dependent import WidthDependent
from normprobe.checks.initialisation.wrong_fan import WrongFan

ALL: tuple[Check, ...] = (
    LinearGainBeforeReLU(),
    UnscaledWriters(),
    RecipeNotApplied(),
    WrongFan(),
    ConstantWeight(),
    BlockedGradient(),
    WidthDependent(),
)
