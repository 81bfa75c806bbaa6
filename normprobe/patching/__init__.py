"""Patch a checkpoint: rewrite its weights, write them down whole, and load what came of it."""
