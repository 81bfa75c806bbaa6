"""The command line: parse, call, pick a renderer, exit code."""
