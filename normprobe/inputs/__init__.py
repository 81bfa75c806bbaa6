"""Inputs for a model that says in its configuration what it takes."""

from normprobe.inputs.given import or_made
from normprobe.inputs.make import capped, complete, inputs_from_config, row_length, takes_ids

__all__ = ["capped", "complete", "inputs_from_config", "or_made", "row_length", "takes_ids"]
