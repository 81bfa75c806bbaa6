"""Rewrites of norms: how they compute, where they stand, and what they are."""
