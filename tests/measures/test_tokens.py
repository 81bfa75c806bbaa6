from __future__ import annotations

import math

import pytest
import torch

from normprobe import stats
from normprobe.measures import tokens


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_rms_is_that_of_the_plain_function_at_every_scale(scale: float, dtype: torch.dtype) -> None:
    x = scale * torch.randn(2, 7, 33, dtype=dtype)
    expected = x.double().square().mean(-1).sqrt().flatten() if scale < 1e20 else stats.token_rms(x).flatten()
    torch.testing.assert_close(tokens.token_rms(x).double(), expected.double(), rtol=1e-5, atol=0.0, check_dtype=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_token(value: float) -> None:
    x = torch.randn(1, 5, 8)
    x[0, 3, 2] = value
    rms = tokens.token_rms(x)
    assert [bool(v) for v in torch.isfinite(rms)] == [True, True, True, False, True]


@pytest.mark.parametrize("piece", [1, 40, 100, 10**6])
@pytest.mark.parametrize("maps", [False, True])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, piece: int, maps: bool) -> None:
    x = torch.randn(3, 11, 8)
    x = x.mT.contiguous().mT if maps else x
    monkeypatch.setattr(tokens, "PIECE", piece)
    torch.testing.assert_close(tokens.norms(x), torch.linalg.vector_norm(x, dim=-1).flatten())
    assert torch.equal(tokens.peaks(x), x.abs().amax(-1).flatten())
    weights = torch.rand(2, 33)
    expected = torch.einsum("kbs,bsc->bkc", weights.view(2, 3, 11), x)
    torch.testing.assert_close(tokens.weighted_sums(x, weights), expected)
    assert torch.equal(tokens.row(x, 15), x[1, 4])
    x[2, 3, 1] = math.nan
    assert tokens.peaks(x).isnan().nonzero().tolist() == [[25]]


def test_layouts() -> None:
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(tokens.as_tokens(x, -1), x.reshape(2, 15, 7))
    assert torch.equal(tokens.as_tokens(x[0, 0], -1), x[:1, 0])
    maps = tokens.as_tokens(x, 1)
    assert maps.shape == (2, 35, 3)
    assert torch.equal(maps[1, 9], x[1, :, 1, 2])
    assert maps.data_ptr() == x.data_ptr(), "channels-first maps are not copied"
