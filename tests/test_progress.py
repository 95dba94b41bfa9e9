"""Progress where there is no terminal: plain lines, few of them."""

from __future__ import annotations

import logging

import pytest

from mobatlas.progress import track


def lines(
    caplog: pytest.LogCaptureFixture,
    notes: list[str],
    hours: float,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """What is logged when a piece of work takes so many hours and reports at even distances."""
    clock = [0.0]
    monkeypatch.setattr("mobatlas.progress.time.monotonic", lambda: clock[0])
    with (
        caplog.at_level(logging.INFO, logger="mobatlas"),
        track("training", len(notes), quiet=True) as tracker,
    ):
        for done, note in enumerate(notes, start=1):
            clock[0] = hours * 3_600 * done / len(notes)
            tracker.step(done, note)
    return [record.getMessage() for record in caplog.records]


def test_every_kind_of_work_has_a_line_and_an_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = lines(caplog, ["reading", "sorting", "writing"], 1 / 3_600, monkeypatch)
    assert [line.split(": ")[1].split(",")[0] for line in said] == ["reading", "sorting", "writing"]
    assert "3 of 3" in said[-1]


def test_numbers_that_change_are_no_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = lines(
        caplog,
        [f"loss {1 / step:.3g}, 700 examples/s" for step in range(1, 10_001)],
        10,
        monkeypatch,
    )
    assert 50 < len(said) < 300  # of ten thousand reports, in ten hours
    assert "10000 of 10000" in said[-1]
    assert "about" in said[10] and "left" in said[10]
