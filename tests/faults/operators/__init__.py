"""All operators, family by family."""

from tests.faults.fault import Fault
from tests.faults.operators import norms

ALL: tuple[Fault, ...] = (*norms.ALL,)
