"""Identification of norms by behaviour."""
