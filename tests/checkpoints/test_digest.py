"""Files are read part by part into one place, and summed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from normprobe.checkpoints import digest
from normprobe.checkpoints.digest import PART, digest_of, parts_in


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 50), start=st.integers(0, 60), length=st.integers(0, 60))
def test_the_parts_are_the_bytes_of_the_range(
    tmp_path_factory: pytest.TempPathFactory, size: int, start: int, length: int
) -> None:
    """A file that ends before gives what it has."""
    path, held = tmp_path_factory.mktemp("parts") / "a", bytes(range(size))
    path.write_bytes(held)
    with pytest.MonkeyPatch.context() as patched, path.open("rb", buffering=0) as stream:
        patched.setattr(digest, "PART", 16)
        parts = [bytes(part) for part in parts_in(stream, start, start + length)]
    assert b"".join(parts) == held[start : start + length]
    assert all(len(part) == 16 for part in parts[:-1])


def test_the_sum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path, held = tmp_path / "a", bytes(range(256)) * (PART // 256 + 1)
    path.write_bytes(held)
    assert digest_of(path) == xxh3_128(held).hexdigest()
