"""A small trained language model with one defect: its residual stream reaches the head without a norm.

It needs torch and safetensors alone. `CARD.md` beside this file says how it was trained and what it reaches.
"""

from normprobe.demo.model import Decoder, build, decode, encode, heldout_text, load

__all__ = ["Decoder", "build", "decode", "encode", "heldout_text", "load"]
