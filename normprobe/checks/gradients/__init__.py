"""What gradients do, and values that are not finite (5xx)."""

from normprobe.checks.base import Check
from normprobe.checks.gradients.exploding_gradient import ExplodingGradient
from normprobe.checks.gradients.gradient_imbalance import GradientImbalance
from normprobe.checks.gradients.non_finite import NonFinite
from normprobe.checks.gradients.vanishing_gradient import VanishingGradient

ALL: tuple[Check, ...] = (GradientImbalance(), VanishingGradient(), ExplodingGradient(), NonFinite())
