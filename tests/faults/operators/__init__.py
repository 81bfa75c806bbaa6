"""All operators, family by family."""

from tests.faults.fault import Fault
from tests.faults.operators import batchnorm, norms, placement, stated

ALL: tuple[Fault, ...] = (*norms.ALL, *placement.ALL, *stated.ALL, *batchnorm.ALL)
