"""Attention sites: the operations, their sides, and which rows feed which head."""
