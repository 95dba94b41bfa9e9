"""The benchmark of two processes beside one: how losses are compared."""

from __future__ import annotations

from typing import Any

import pytest

from bench.processes import compared
from mobatlas import MobatlasError


def lines(*losses: float, **last: float) -> list[dict[str, Any]]:
    steps = (1, *range(10, 10 * len(losses), 10))
    found: list[dict[str, Any]] = [
        {"step": step, "loss": loss} for step, loss in zip(steps, losses, strict=True)
    ]
    found[-1] |= {"lr": 0.1, "seconds": 3.0} | last
    return found


def test_the_largest_difference_is_told_up_to_several_steps() -> None:
    found = compared(lines(4.0, 3.0, 2.0, nats=2.5), lines(4.0, 3.3, 1.0, nats=2.25))
    assert (found["loss"], found["reference_loss"], found["loss_difference"]) == (1.0, 2.0, -1.0)
    assert (found["nats"], found["nats_difference"]) == (
        2.25,
        -0.25,
    ) and "lr_difference" not in found
    assert found["largest_relative_difference"] == pytest.approx(
        {"to step 1": 0.0, "to step 10": 0.1, "to step 20": 0.5}
    )


def test_runs_that_logged_other_steps_are_not_compared() -> None:
    with pytest.raises(MobatlasError, match="nothing can be compared"):
        compared(lines(4.0, 3.0), lines(4.0))
