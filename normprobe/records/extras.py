"""Measures that run only when they are asked for: their names, what they tell, and the passes that each costs."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

ExtraName = Literal["gain", "jacobian", "smoothness", "batchnorm", "depth", "norms", "products", "cost", "precision"]
EXTRA_NAMES: tuple[ExtraName, ...] = get_args(ExtraName)


class About(NamedTuple):
    """What a measure tells, in one line, which passes it takes beyond those of the level, and whether these are of a
    loss that can be given."""

    tells: str
    passes: str
    loss: bool = False


ABOUT: dict[ExtraName, About] = {
    "batchnorm": About(
        "batch against stored statistics, train against eval mode, half the batch",
        "4 forwards where there is a batch norm: eval mode, batch norms in train mode, either half of the batch so",
    ),
    "gain": About(
        "RMS and gradient RMS across every block, and what they make of the depth",
        "1 forward, 1 backward a stream",
        loss=True,
    ),
    "jacobian": About(
        "mean squared singular value of the Jacobian of every block and of the model, by 8 random probes",
        "1 forward; 8 backwards through every block, 8 through every stream, 8 from the output to every input",
    ),
    "smoothness": About(
        "how fast the loss gradient changes along the gradient step (its Lipschitz constant)",
        "5 forwards, 5 backwards",
        loss=True,
    ),
    "depth": About(
        "what the output loses when a branch is skipped, and what the head reads after each block",
        "1 forward, 1 for each write (at most 64), 1 for each block but the last of its stream; small ones together, "
        "on copies of the batch",
    ),
    "norms": About("input-output curve of every norm, how near it is to tanh, statistics of its gain", "1 forward"),
    "products": About("what every product with a weight makes of the second moment of its input", "1 forward"),
    "cost": About(
        "operations, reductions and bytes of every norm, their share of a forward and of one token",
        "1 forward that counts, 6 that are timed, 6 of one token where the model takes tokens",
    ),
    "precision": About(
        "relative error of norms, writes and outputs in half precision, first overflow, half-precision reductions",
        "1 forward in float32 and 1 in each half precision, each of these 2 more where something is not finite",
    ),
}
