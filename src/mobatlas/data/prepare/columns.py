"""What a column of any source says, as text, number or flag; the same on every engine."""

from __future__ import annotations

import ibis
from ibis import ir

TRUE_WORDS = ("true", "t", "yes", "y", "1", "1.0")
FALSE_WORDS = ("false", "f", "no", "n", "0", "0.0")
NO_ANSWER = ("", "nan", "na", "none", "null")


def as_text(column: ir.Value) -> ir.Value:
    """Text; what is empty is null. (No `strip`: on Spark, Ibis 12 takes the letters v and f for white space.)"""
    return column.cast("string").nullif("")


def as_number(column: ir.Value) -> ir.Value:
    """A float; null where it is none."""
    kind = column.type()
    value = (
        column.cast("float64")
        if kind.is_numeric() or kind.is_boolean()
        else as_text(column).try_cast("float64")
    )
    return ibis.ifelse(value.isnan(), ibis.null("float64"), value)


def as_flag(column: ir.Value) -> ir.Value:
    """A boolean from booleans, numbers or words."""
    if column.type().is_boolean():
        return column.fill_null(False)
    return column.cast("string").lower().isin(TRUE_WORDS).fill_null(False)


def is_word(raw: ir.Value, known: tuple[str, ...] = NO_ANSWER) -> ir.Value:
    """Whether a column of text says something, and none of these words."""
    if not raw.type().is_string():
        return raw.isnull() & raw.notnull()  # false, row for row
    return (~raw.lower().isin(known)).fill_null(False)


def nearest_whole(value: ir.Value) -> ir.Value:
    """Rounded to an integer: engines differ in how they round, not in how they floor."""
    return (value + 0.5).floor().cast("int64")
