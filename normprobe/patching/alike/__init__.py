"""A rewritten model as one of another architecture, or of its own with a switch turned, if that computes the same.

`model` does it: `configuration` says what the other is built with, `tensors` which tensor goes where, by its name or by
its place in the data flow (`places`), and `outputs` whether both give the same. `tokens` looks at the tokeniser.
"""
