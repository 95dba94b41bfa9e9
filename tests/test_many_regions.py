"""Many regions and groups give the same answers as few, in little memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from bench import many_regions
from bench.measure import Measured
from mobatlas.data.types import Floats
from mobatlas.regions import types
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import load_aggregates, write_aggregates
from mobatlas.regions.types import Aggregates, Composition, Regions
from mobatlas.supervision import tilt as tilts
from mobatlas.supervision.tilt import _FittedRows, fit_tilt

PANEL = 30.0


def many(regions: int, groups: int, pois: int, seed: int = 0) -> tuple[Regions, Floats]:
    """Return regions with aggregates of their groups, and the true group means."""
    world = many_regions.make_world(regions, groups, seed, pois)
    rng = np.random.default_rng(seed)
    values = rng.poisson(PANEL * world.shares @ world.means) / PANEL
    names = tuple(f"R{number}" for number in range(regions))
    features = tuple(f"poi:{number}" for number in range(pois))
    composition = Composition(world.groups, names, world.shares, np.full(regions, 1_500.0))
    aggregates = Aggregates(
        names, features, values, np.full(regions, PANEL), spread=world.shares.mean(0) @ world.means
    )
    centroids = np.array([40.0, -100.0]) + rng.normal(0, 0.3, (regions, 2))
    return Regions(composition, aggregates, randomised=False, centroids=centroids), world.means


def peak(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function and its peak memory in megabytes."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def inline(work: Callable[..., Any], *arguments: Any) -> Measured:
    start = time.perf_counter()
    return Measured(value=work(*arguments), seconds=time.perf_counter() - start, peak_gb=1.0)


@pytest.mark.parametrize(("regions", "groups", "bins"), [(10_000, 90, 8), (1_000, 18, 60)])
def test_thousands_of_regions_and_dozens_of_groups_are_recovered(
    regions: int, groups: int, bins: int
) -> None:
    simulated, truth = many(regions, groups, bins)
    score = many_regions.error(recover(simulated, quiet=True), truth)
    assert score["error"] < 0.85 * score["baseline_error"]
    assert score["coverage"] > 0.85


def test_memory_grows_in_proportion_to_the_number_of_regions() -> None:
    few, more = (
        peak(partial(recover, many(size, 12, 16)[0], quiet=True))[1] for size in (2_000, 8_000)
    )
    assert more < 6 * few, "regions x regions would be 16 times as much"


def test_recovery_does_not_depend_on_the_size_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = many(120, 8, 16)
    values = made.aggregates.values.copy()
    values[np.random.default_rng(1).random(values.shape) < 0.1] = np.nan
    values[:, 3:] = made.aggregates.values[:, 3:]
    made = replace(
        made, aggregates=replace(made.aggregates, values=values, noise=np.full(values.shape, 1e-3))
    )
    whole = recover(made)
    monkeypatch.setattr(types, "BLOCK_CELLS", 1_000)
    apart = recover(made)
    assert apart.means == pytest.approx(whole.means, rel=0.02)
    assert apart.sd == pytest.approx(whole.sd, rel=0.05)


def test_aggregates_are_written_and_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = many(70, 8, 30)
    values = made.aggregates.values.copy()
    values[3, 4] = np.nan
    v = replace(made.aggregates, values=values, n=np.linspace(1.0, 70.0, 70), noise=values**2)
    monkeypatch.setattr(types, "BLOCK_CELLS", 200)
    write_aggregates(tmp_path / "v.parquet", v)
    read = load_aggregates(tmp_path / "v.parquet")
    assert (read.regions, read.features) == (v.regions, v.features)
    assert np.array_equal(read.values, v.values, equal_nan=True) and np.array_equal(read.n, v.n)
    assert read.noise is not None and np.allclose(read.noise, v.values**2, equal_nan=True)


def test_tilts_fitted_on_a_sample_hold_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = sparse.csr_array(rng.poisson(0.4, (8_000, 12)).astype(float))
    target = np.asarray(rows.mean(0)).ravel() * rng.uniform(0.8, 1.25, 12)
    prior = rng.random(8_000)
    monkeypatch.setattr(tilts, "MAX_ROWS", 4_000)
    tilt = _FittedRows.of(rows, 1e-3).fit(target, prior, None)
    exact = fit_tilt(rows, target, 1e-3, prior=prior)
    assert tilt.weights.shape == (8_000,) and tilt.weights.sum() == pytest.approx(1)
    assert np.abs(tilt.unmet).max() < 4 * np.sqrt(target.max() / 4_000)
    assert tilt.effective_sample_size == pytest.approx(exact.effective_sample_size, rel=0.05)


def test_regions_diagnosis_recovery_and_tilts_with_three_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_regions, "POIS", 40)
    monkeypatch.setattr(many_regions, "measure", inline)
    found = many_regions.rows(tmp_path, 0, sizes=((150, 20),))
    assert [row["task"] for row in found] == ["regions", "diagnose", "recovery", "tilts"]
    assert {row["size"] for row in found} == {"150 regions, 20 groups, 40 POIs, 4,500 people"}
    assert found[0]["kept"] == 150
    assert 0 < found[2]["error"] < found[2]["baseline_error"]
    assert found[3]["converged"] == 1


@pytest.mark.slow
def test_ten_thousand_regions_and_ninety_groups_take_minutes_and_four_gigabytes(
    tmp_path: Path,
) -> None:
    found = many_regions.rows(tmp_path, 0, sizes=((10_000, 90),))
    assert max(row["peak_gb"] for row in found) < 4
    recovered = next(row for row in found if row["task"] == "recovery")
    assert recovered["error"] < 0.85 * recovered["baseline_error"]
    assert recovered["coverage"] > 0.8
