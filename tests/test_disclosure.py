"""Disclosure control of aggregates: what hides, what is added, and that recovery knows how much."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import sparse
from typer.testing import CliRunner

from mobatlas import MobatlasError
from mobatlas.cli.commands import app
from mobatlas.regions.aggregates import TableContext, aggregate, read_aggregates
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.disclosure import Disclosure, apply_disclosure, clip_visits
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import RegionsFolder, build_regions, load_regions
from tests.regional import FOUR, dirichlet, regions_of
from tests.tiny import small_city

PHI = sparse.csr_array(np.array([[2.0, 0, 1], [4, 0, 0], [0, 1, 0], [6, 3, 0], [1, 0, 0]]))
REGION = np.array([0, 0, 0, 1, -1])
NAMES = ("A", "B")


def test_a_cell_with_few_people_behind_it_hides_and_an_empty_one_does_not() -> None:
    v = aggregate(PHI, REGION, NAMES)
    released = apply_disclosure(v, PHI, REGION, Disclosure(suppress=2)).values
    assert released[0, 0] == pytest.approx(2.0), "two people of region A go there"
    assert np.isnan(released[0, 1]) and np.isnan(released[0, 2]) and np.isnan(released[1, 0])
    assert released[1, 2] == 0


def test_totals_become_multiples_and_recovery_uses_their_variance() -> None:
    v = aggregate(PHI, REGION, NAMES)
    released = apply_disclosure(v, PHI, REGION, Disclosure(rounding=5))
    assert (released.values * released.n[:, None]).tolist() == [[5, 0, 0], [5, 5, 0]]
    assert released.noise == pytest.approx(np.repeat(25 / 12 / np.array([[9.0], [1.0]]), 3, axis=1))


def test_each_person_adds_at_most_max_visits_to_the_totals() -> None:
    rng = np.random.default_rng(0)
    phi = sparse.csr_array(rng.poisson(2.0, (50, 8)).astype(float))
    clipped = clip_visits(phi, 5.0).toarray()
    assert clipped.sum(1).max() <= 5 + 1e-12
    few = phi.toarray().sum(1) <= 5
    assert np.array_equal(clipped[few], phi.toarray()[few])
    assert clipped[~few] == pytest.approx(
        phi.toarray()[~few] * 5 / phi.toarray()[~few].sum(1, keepdims=True)
    )


def test_noise_is_as_large_as_epsilon_says_and_cannot_be_repeated() -> None:
    pytest.importorskip("opendp")
    phi = sparse.csr_array(np.ones((40, 100)))
    region = np.arange(40) % 20
    v = aggregate(phi, region, tuple(map(str, range(20))))
    rules = Disclosure(epsilon=2.0, max_visits=100.0)
    one, two = (apply_disclosure(v, phi, region, rules) for _ in range(2))
    added = (one.values - v.values) * v.n[:, None]  # (20, 100) Laplace of scale 50
    assert np.abs(added).mean() == pytest.approx(50, rel=0.1)
    assert one.noise == pytest.approx(np.full((20, 100), 2 * 50.0**2 / 4))
    assert not np.array_equal(one.values, two.values)
    assert one.spread is None, "what was counted exactly is not shown"


def test_recovery_is_as_sure_as_the_noise_allows() -> None:
    """Noise differs between regions: error bars cover the truth only if recovery knows it."""
    rng = np.random.default_rng(1)
    shares = dirichlet(80, 4, seed=3)
    means = 5 + rng.normal(0, 0.3, (4, 40))
    sd = np.where(np.arange(80) < 60, 1.5, 0.05)[:, None] * np.ones((80, 40))
    values = (
        shares @ means + rng.normal(0, 1, (80, 40)) / np.sqrt(500) + sd * rng.normal(size=(80, 40))
    )
    with_noise = recover(regions_of(shares, values, 500.0, FOUR, spread=np.ones(40), noise=sd**2))
    without_noise = recover(regions_of(shares, values, 500.0, FOUR, spread=np.ones(40)))
    coverage = [
        np.mean((means >= low) & (means <= high))
        for low, high in (with_noise.interval(), without_noise.interval())
    ]
    assert coverage[0] > 0.8 > coverage[1]
    error = [
        np.sqrt(((released.means - means) ** 2).mean()) for released in (with_noise, without_noise)
    ]
    assert error[0] < 0.6 * error[1], "quiet regions count for more"


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"epsilon": 1.0}, "--epsilon needs --max-visits"),
        ({"max_visits": 5.0}, "--max-visits needs --epsilon"),
        ({"epsilon": 0.0, "max_visits": 5.0}, "--epsilon 0: give a positive number"),
        ({"epsilon": 1.0, "max_visits": 5.0, "suppress": 3}, "--suppress uses exact counts"),
        ({"suppress": -1}, "--suppress and --round"),
    ],
)
def test_rules_that_do_not_go_together_are_refused(rules: dict[str, float], sentence: str) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        Disclosure(**rules)  # type: ignore[arg-type]


def test_without_opendp_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    v = aggregate(PHI, REGION, NAMES)
    with pytest.raises(MobatlasError, match=r"pip install 'mobatlas\[dp\]'"):
        apply_disclosure(v, PHI, REGION, Disclosure(epsilon=1.0, max_visits=5.0))


def test_the_command_writes_nothing_exact_and_its_table_can_be_published(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    dataset = small_city(tmp_path, users=400)
    options = (
        "--partition",
        "demogroups",
        "--feature",
        "category",
        "--epsilon",
        "1",
        "--max-visits",
        "60",
    )
    done = CliRunner().invoke(
        app, ["regions", str(dataset.path), *options, "--out", str(tmp_path / "regions")]
    )
    assert done.exit_code == 0, done.output
    regions = load_regions(tmp_path / "regions")
    exact = build_regions(
        dataset.path,
        tmp_path / "exact",
        RegionsOptions(partition="demogroups", features=["category"]),
    )
    assert regions.details["disclosure"]["epsilon"] == 1 and exact.details["disclosure"] is None
    assert regions.population is None and exact.population is not None
    assert not np.isclose(regions.aggregates.values, exact.aggregates.values).any()
    twins = [RegionsFolder.open(tmp_path / name).validation for name in ("regions", "exact")]
    if twins[0] is not None and twins[1] is not None:
        assert not np.isclose(twins[0].values, twins[1].values).any()
    table = tmp_path / "regions" / "aggregates.parquet"
    assert "noise_sd" in pq.read_schema(table).names
    published = read_aggregates(table, TableContext())[0]
    assert published.noise == pytest.approx(regions.aggregates.noise)
    assert np.isfinite(
        recover(replace(regions, aggregates=replace(published, spread=None))).means
    ).all()
    with pytest.raises(MobatlasError, match="not to the published table"):
        build_regions(
            dataset.path,
            tmp_path / "again",
            RegionsOptions(
                composition=tmp_path / "p.csv", aggregates=table, disclosure=Disclosure(suppress=5)
            ),
        )
