"""The benchmark of two processes against one: how losses are compared."""

from __future__ import annotations

from typing import Any

import pytest

from bench.processes import compare_losses
from mobatlas import MobatlasError


def log_of(*losses: float, **validation: float) -> list[dict[str, Any]]:
    steps = (1, *range(10, 10 * len(losses), 10))
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": loss} for step, loss in zip(steps, losses, strict=True)
    ]
    lines[-1] |= {"lr": 0.1, "seconds": 3.0} | validation
    return lines


def test_the_largest_difference_is_reported_up_to_several_steps() -> None:
    comparison = compare_losses(log_of(4.0, 3.0, 2.0, nats=2.5), log_of(4.0, 3.3, 1.0, nats=2.25))
    assert comparison["loss"] == 1.0
    assert comparison["reference_loss"] == 2.0
    assert comparison["loss_difference"] == -1.0
    assert comparison["nats"] == 2.25
    assert comparison["nats_difference"] == -0.25
    assert "lr_difference" not in comparison
    assert comparison["largest_relative_difference"] == pytest.approx(
        {"to step 1": 0.0, "to step 10": 0.1, "to step 20": 0.5}
    )


def test_runs_that_logged_different_steps_are_not_compared() -> None:
    with pytest.raises(MobatlasError, match="logged different steps"):
        compare_losses(log_of(4.0, 3.0), log_of(4.0))
