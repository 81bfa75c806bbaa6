"""All operators, family by family."""

from tests.faults.fault import Fault
from tests.faults.operators import (
    attention,
    batchnorm,
    gradients,
    initialisation,
    norms,
    placement,
    reparametrised,
    residual,
    stated,
)

ALL: tuple[Fault, ...] = (
    *norms.ALL,
    *placement.ALL,
    *stated.ALL,
    *residual.ALL,
    *attention.ALL,
    *gradients.ALL,
    *initialisation.ALL,
    *batchnorm.ALL,
    *reparametrised.ALL,
)
