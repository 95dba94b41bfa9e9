"""The experiment runner of benchmarks: cells are computed once, and an interrupted run resumes."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.runner import Cell, Command, Experiment, Runner, read_cell, resume_hints
from mobatlas import MobatlasError
from mobatlas.training.checkpoints import START_OVER
from mobatlas.training.loop import Stopped


class Computations:
    """Counts how often each cell is computed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def cell(self, name: str, *, seed: int | None = 0, **inputs: Any) -> Cell:
        def compute() -> Mapping[str, Any]:
            self.names.append(name)
            if inputs.get("fails"):
                raise MobatlasError("no memory; continue with --resume")
            return {"value": inputs.get("value", 0)}

        return Cell(seed, name, inputs, compute, minutes=3)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(Experiment(tmp_path / "out", seeds=2), "test", Command("test", {"--x": ["a b"]}))


def test_a_finished_cell_is_read_and_a_cell_with_other_inputs_is_computed_again(
    runner: Runner,
) -> None:
    computed = Computations()
    cells = [computed.cell("first", value=1), computed.cell("second", value=2)]
    assert [each["value"] for each in runner.run(cells)] == [1, 2]
    changed = [computed.cell("first", value=1), computed.cell("second", value=3)]
    assert [each["value"] for each in runner.run(changed)] == [1, 3]
    assert computed.names == ["first", "second", "second"]


def test_a_run_resumes_at_the_cell_that_failed(runner: Runner) -> None:
    computed = Computations()
    with pytest.raises(MobatlasError, match="no memory; the same command resumes"):
        runner.run([computed.cell("first"), computed.cell("second", fails=True)])
    runner.run([computed.cell("first"), computed.cell("second")])
    assert computed.names == ["first", "second", "second"]


def test_a_deleted_or_unrecorded_result_is_computed_again(runner: Runner) -> None:
    computed = Computations()
    runner.run([computed.cell("first")])
    (runner.out / "seed-0" / "first.json").unlink()
    runner.run([computed.cell("first")])
    (runner.out / "seed-0" / "steps.json").unlink()
    runner.run([computed.cell("first")])
    assert computed.names == ["first"] * 3


def test_runners_of_one_folder_share_their_cells(runner: Runner) -> None:
    computed = Computations()
    other = Runner(runner.experiment, "other", Command("other"))
    runner.run([computed.cell("first")])
    other.run([computed.cell("second")])
    for each in (runner, other):
        each.run([computed.cell("first"), computed.cell("second")])
    assert computed.names == ["first", "second"]


def test_a_cell_states_the_command_of_its_seed_and_seeds_have_folders(runner: Runner) -> None:
    computed = Computations()
    runner.run([computed.cell("cell", seed=1), computed.cell("shared", seed=None)])
    cell = read_cell(runner.out, 1, "cell")
    command = "python -m bench test --x 'a b' --seeds 1 --first-seed 1 --out out"
    assert cell["command"] == command
    assert cell["seed"] == 1
    assert json.loads((runner.out / "seed-1" / "cell.json").read_text()) == cell
    shared = read_cell(runner.out, None, "shared")["command"]
    assert shared == "python -m bench test --x 'a b' --seeds 2 --first-seed 0 --out out"


def test_the_forecast_counts_the_cells_that_are_left(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    computed = Computations()
    runner.run([computed.cell("first")])
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="mobatlas"):
        runner.run([computed.cell(name) for name in ("first", "second", "third")])
    forecast = "test: 3 cells, 1 of them finished, about 6 minutes on two cores"
    assert caplog.messages[0] == forecast
    assert any(line.startswith("test: seed 0, second, 0 of 2") for line in caplog.messages)


def test_errors_advise_no_option_that_benchmarks_lack() -> None:
    with (
        pytest.raises(Stopped, match=r"stopped at step 3; the same command resumes$") as stopped,
        resume_hints(),
    ):
        raise Stopped("stopped at step 3", [int(signal.SIGTERM)])
    assert stopped.value.signal == signal.SIGTERM
    for advice in (START_OVER, "pass --overwrite to train again"):
        with (
            pytest.raises(MobatlasError, match=r"model: other options, or choose another --out$"),
            resume_hints(),
        ):
            raise MobatlasError(f"model: other options, or {advice}")
