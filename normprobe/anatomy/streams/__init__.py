"""Residual streams: adds, chains, branches, placement, readout."""
