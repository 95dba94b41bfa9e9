from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from mobatlas import MobatlasError, load_run
from mobatlas.config import Coarsening, PrepareConfig, format_assignments, merge, parse_assignments
from mobatlas.data.prepare.pipeline import prepare_config


def run_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_defaults_of_preparation_are_the_papers() -> None:
    """Appendix, "Preprocessing pipeline"."""
    config = PrepareConfig()
    assert (config.window.days, config.window.stride) == (14, 7)
    assert (config.quality.max_day_km, config.quality.max_unreliable) == (800, 0.1)
    assert (config.quality.min_coverage, config.quality.min_high_quality) == (0.2, 0.8)
    assert (config.split.train, config.split.val, config.split.test) == (0.8, 0.1, 0.1)
    assert config.anchors.require_both


def test_a_run_is_one_file_on_top_of_a_preset(tmp_path: Path) -> None:
    path = run_file(tmp_path, "preset: small\nseed: 5\nprepare:\n  window: {stride: 1}\n")
    run = load_run(path)
    assert (run.seed, run.prepare.window.stride) == (5, 1)
    assert run.prepare.window.days == load_run(preset="small").prepare.window.days != 14


def test_the_presets_differ_in_size() -> None:
    small, paper = load_run(preset="small"), load_run(preset="paper")
    assert small.simulate.pois < paper.simulate.pois
    assert paper.prepare.window.days == 14


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prepar: {}", r"unknown key 'prepar'; did you mean 'prepare'\?"),
        (
            "prepare: {window: {dais: 3}}",
            r"unknown key 'dais' in 'prepare.window'; did you mean 'days'\?",
        ),
        (
            "prepare: {window: {days: 0}}",
            "'prepare.window.days' is wrong: .*greater than or equal to 1",
        ),
        (
            "prepare: {split: {train: 0.5}}",
            "'prepare.split' is wrong: train . val . test is 0.7, not 1",
        ),
        ("seed: never", "'seed' is wrong"),
        ("preset: papr", r"preset 'papr' does not exist; did you mean 'paper'\?"),
        ("[1, 2]", "is a mapping"),
        ("a: [", "not valid YAML at line 1"),
        ("prepare: {attributes: []}", "give at least one attribute"),
    ],
)
def test_a_wrong_file_is_refused_with_one_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence) as caught:
        load_run(run_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"nowhere\.yaml: no such configuration file"):
        load_run(tmp_path / "nowhere.yaml")


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    with pytest.raises(MobatlasError, match="not valid YAML"):
        load_run(run_file(tmp_path, f"seed: !!python/object/apply:os.system ['touch {marker}']"))
    assert not marker.exists()


def test_assignments_reach_into_sections() -> None:
    values = parse_assignments(
        ["window.days=1", "quality.min_coverage=0", "window.origin=2024-01-01"]
    )
    assert values == {
        "window": {"days": 1, "origin": date(2024, 1, 1)},
        "quality": {"min_coverage": 0},
    }
    with pytest.raises(MobatlasError, match=r"section\.key=value"):
        parse_assignments(["window.days"])


def test_assignments_can_be_written_and_read_again() -> None:
    values = {
        "denoiser": {"distance_curves": 4, "decay": "none"},
        "resume": True,
        "levels": [1, 0.5],
        "rate": 1e-5,
        "share": 0.1,
    }
    assert parse_assignments(list(format_assignments(values))) == values


def test_what_suits_the_source_gives_way_to_the_user() -> None:
    assert prepare_config("foursquare").quality.min_coverage == 0
    assert (
        prepare_config("foursquare", {"quality": {"min_coverage": 0.3}}).quality.min_coverage == 0.3
    )
    assert prepare_config("plain").quality.min_coverage == 0.2


def test_later_layers_win_and_do_not_erase_their_neighbours() -> None:
    assert merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"b": 4}) == {
        "a": {"x": 1, "y": 3},
        "b": 4,
    }


def test_a_coarsening_is_a_radius_or_a_grid(tmp_path: Path) -> None:
    expected = {
        "1": Coarsening("disc", 1.0),
        "1.5 km": Coarsening("disc", 1.5),
        "500m": Coarsening("disc", 0.5),
        "grid:500m": Coarsening("grid", 0.5),
        "0": Coarsening("disc", 0.0),
    }
    for text, coarsening in expected.items():
        assert Coarsening.parse(text) == coarsening
        assert (
            load_run(run_file(tmp_path, f"samples: {{coarsen: '{text}'}}")).samples.coarsen == text
        )
    assert load_run(run_file(tmp_path, "samples: {coarsen: 2}")).samples.coarsen == 2
    with pytest.raises(
        MobatlasError,
        match=r"'samples\.coarsen' is wrong: give a radius of 0 km or more, such as 1km",
    ):
        load_run(run_file(tmp_path, "samples: {coarsen: far}"))
