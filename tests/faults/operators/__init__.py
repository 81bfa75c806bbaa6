"""All operators, family by family."""

from tests.faults.fault import Fault
from tests.faults.operators import (
    attention,
    batchnorm,
    branches,
    cost,
    gains,
    gradients,
    initialisation,
    norms,
    placement,
    qk_norms,
    reparametrised,
    residual,
    skips,
    stated,
    tokens,
)

ALL: tuple[Fault, ...] = (
    *norms.ALL,
    *gains.ALL,
    *placement.ALL,
    *branches.ALL,
    *qk_norms.ALL,
    *stated.ALL,
    *residual.ALL,
    *skips.ALL,
    *attention.ALL,
    *gradients.ALL,
    *initialisation.ALL,
    *batchnorm.ALL,
    *reparametrised.ALL,
    *tokens.ALL,
    *cost.ALL,
)
