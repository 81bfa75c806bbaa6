"""Small networks with batch norms: convolutions in a row, with residual adds, and over sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """Two convolutions, each with its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.conv(self.first(self.stem(x)).relu())).relu()
        return self.head(x.mean((2, 3)))

    def data(self, rows: int) -> Tensor:
        """A batch with a mean and a scale of its own."""
        return 2 * torch.randn(rows, 3, 8, 8) + 1


class Residual(Plain):
    """The second convolution is added."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).relu()
        x = x + self.second(nn.functional.pad(self.conv(x), (1, 1, 1, 1)))
        return self.head(x.mean((2, 3)))


class Sequences(nn.Module):
    """A linear map and a batch norm over the features of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(self.stem(x).mT).mT.relu())

    def data(self, rows: int) -> Tensor:
        """A batch with a mean and a scale of its own."""
        return 2 * torch.randn(rows, 12, 6) + 1


def seen(network: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A network in eval mode whose statistics have seen sixty batches like the one beside it."""
    torch.manual_seed(0)
    model = network().train()
    with torch.no_grad():
        for _ in range(60):
            model(model.data(16))  # type: ignore[operator]
    return model.eval(), model.data(16)  # type: ignore[operator]
