"""The closed forms of ROME and MEMIT against explicit solutions of what they minimise, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.baselines.closed_forms import exact_update, spread_update
from kvprobe.baselines.second_moment import with_ridge


def drawn(seed: int, units: int, hidden: int, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A second moment, keys and changes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    text = normal(3 * units, units)
    return text.T @ text / len(text), normal(units, requests), normal(hidden, requests)


@given(seed=st.integers(0, 10**6), units=st.integers(2, 9), hidden=st.integers(1, 6))
def test_one_key_against_constrained_least_squares(seed: int, units: int, hidden: int) -> None:
    """Lagrange's conditions of min tr(dW C dW^T) under dW k = change, solved as one linear system for all of dW."""
    moment, keys, changes = drawn(seed, units, hidden, 1)
    key, change = keys[:, 0], changes[:, 0]
    size = hidden * units
    system = torch.zeros(size + hidden, size + hidden, dtype=torch.float64)
    for row in range(hidden):
        at = slice(row * units, (row + 1) * units)
        system[at, at] = 2 * moment
        system[at, size + row] = key
        system[size + row, at] = key
    right = torch.cat([torch.zeros(size, dtype=torch.float64), change])
    solved = torch.linalg.solve(system, right)[:size].reshape(hidden, units)
    update = exact_update(moment, key, change)
    torch.testing.assert_close(update, solved, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(update @ key, change)
    assert torch.linalg.matrix_rank(update) == 1


@given(seed=st.integers(0, 10**6), requests=st.integers(1, 4), weight=st.floats(0.01, 100.0))
def test_several_keys_against_ordinary_least_squares(seed: int, requests: int, weight: float) -> None:
    """|dW [sqrt(weight) C^(1/2), K] - [0, R]|^2 is what is minimised."""
    moment, keys, changes = drawn(seed, 6, 3, requests)
    root = torch.linalg.cholesky(moment)
    left = torch.cat([weight**0.5 * root, keys], 1)
    right = torch.cat([torch.zeros(3, 6, dtype=torch.float64), changes], 1)
    solved = torch.linalg.lstsq(left.T, right.T).solution.T
    torch.testing.assert_close(spread_update(moment, keys, changes, weight), solved, atol=1e-8, rtol=1e-6)


@given(seed=st.integers(0, 10**6))
def test_without_weight_on_the_text_one_request_is_met_exactly(seed: int) -> None:
    moment, keys, changes = drawn(seed, 6, 3, 1)
    spread = spread_update(moment, keys, changes, 1e-9)
    torch.testing.assert_close(spread, exact_update(moment, keys[:, 0], changes[:, 0]), atol=1e-5, rtol=1e-5)


def test_a_ridge_is_relative_to_the_text() -> None:
    moment, _, _ = drawn(0, 5, 1, 1)
    for scale in (1.0, 1e4):
        added = with_ridge(scale * moment, 0.1) - scale * moment
        assert added.diagonal().mean() == pytest.approx(0.1 * float(scale * moment.diagonal().mean()))
        assert torch.count_nonzero(added) == 5
