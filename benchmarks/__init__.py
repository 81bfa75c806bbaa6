"""Benchmarks: coverage of transformers' architectures, and the cost of reading structure."""
