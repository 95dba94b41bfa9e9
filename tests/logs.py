"""Small visit logs, and a second, slow implementation of the preprocessing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

VISITS = pa.schema(
    [
        ("user_id", pa.string()),
        ("poi_id", pa.string()),
        ("lat", pa.float64()),
        ("lon", pa.float64()),
        ("category", pa.string()),
        ("arrival", pa.timestamp("us")),
        ("departure", pa.timestamp("us")),
        ("is_home", pa.bool_()),
        ("is_work", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Visit:
    """A row of visits; a place called home or work carries the flag."""

    user: str
    place: str
    arrival: str
    departure: str | None = None
    lat: float = 40.0
    lon: float = -74.0
    category: str = "shop"

    def row(self) -> dict[str, Any]:
        return {
            "user_id": self.user,
            "poi_id": self.place,
            "lat": self.lat,
            "lon": self.lon,
            "category": "home" if self.place == "home" else self.category,
            "arrival": datetime.fromisoformat(self.arrival),
            "departure": datetime.fromisoformat(self.departure) if self.departure else None,
            "is_home": self.place == "home",
            "is_work": self.place == "work",
        }


def write_visits(folder: Path, visits: list[Visit]) -> Path:
    """visits.parquet in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.Table.from_pylist([visit.row() for visit in visits], VISITS), folder / "visits.parquet"
    )
    return folder


def read_sequences(dataset: Path) -> dict[tuple[str, int], list[str]]:
    """(user, window) -> place names, read from the long table."""
    names = dict(
        zip(
            *(
                pq.read_table(dataset / "vocabulary.parquet")[c].to_pylist()
                for c in ("token", "poi_id")
            ),
            strict=True,
        )
    )
    sequences: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in pq.read_table(dataset / "trajectories.parquet").to_pylist():
        assert row["position"] == len(sequences[row["user_id"], row["window"]])
        sequences[row["user_id"], row["window"]].append(names[row["token"]])
    return dict(sequences)


def slow_preparation(
    rows: list[dict[str, Any]],
    *,
    days: int,
    stride: int,
    min_coverage: float,
    vocabulary: list[str],
) -> dict[tuple[str, int], list[tuple[str, datetime, datetime]]]:
    """Preprocess one person at a time: (user, window) -> (token, arrival, departure)."""
    unique = [
        dict(items)
        for items in dict.fromkeys(tuple(sorted(row.items(), key=lambda kv: kv[0])) for row in rows)
    ]
    people: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in unique:
        people[row["user_id"]].append(row)
    kept = {}
    for user, visits in people.items():
        pieces = []
        for visit in visits:
            token = "HOME" if visit["is_home"] else "WORK" if visit["is_work"] else visit["poi_id"]
            if token not in ("HOME", "WORK") and token not in vocabulary:
                token = "OTHER"
            arrival, departure = visit["arrival"], visit["departure"] or visit["arrival"]
            rank = {"HOME": 4, "WORK": 5, "OTHER": 6}.get(
                token, 7 + (vocabulary.index(token) if token in vocabulary else 0)
            )
            start = arrival
            while True:
                midnight = datetime.combine(start.date() + timedelta(days=1), datetime.min.time())
                end = min(departure, midnight)
                pieces.append(
                    (start, arrival, departure, rank, token, end, visit["lat"], visit["lon"])
                )
                if departure <= midnight:
                    break
                start = midnight
        pieces.sort(key=lambda p: p[:4])
        by_day: dict[Any, list[Any]] = defaultdict(list)
        for piece in pieces:
            by_day[piece[0].date()].append(piece)
        first = min(by_day)
        last = (max(by_day) - first).days
        for window in range(last // stride + 1):
            dates = [first + timedelta(days=window * stride + offset) for offset in range(days)]
            inside = [piece for date in dates for piece in by_day.get(date, [])]
            if not inside:
                continue
            unreliable = sum(_diagonal_km(by_day[date]) > 800 for date in dates if date in by_day)
            good = sum(_coverage(by_day.get(date, [])) >= min_coverage for date in dates)
            if unreliable > math.floor(0.1 * days + 1e-9) or good < math.ceil(0.8 * days - 1e-9):
                continue
            tokens: list[tuple[str, datetime, datetime]] = []
            for start, _, _, _, token, end, _, _ in inside:
                if tokens and tokens[-1][0] == token:
                    tokens[-1] = (token, tokens[-1][1], max(tokens[-1][2], end))
                else:
                    tokens.append((token, start, end))
            kept[user, window] = tokens
    return kept


def most_visited(rows: list[dict[str, Any]], users: set[str], size: int) -> list[str]:
    """The POIs that these users visit most, duplicates counted once; ties by name."""
    unique = dict.fromkeys(tuple(sorted(row.items(), key=lambda kv: kv[0])) for row in rows)
    counted = Counter(
        row["poi_id"]
        for row in map(dict, unique)
        if row["user_id"] in users and not row["is_home"] and not row["is_work"]
    )
    return [poi for poi, _ in sorted(counted.items(), key=lambda kv: (-kv[1], kv[0]))[:size]]


def _coverage(pieces: list[Any]) -> float:
    """Observed share of a day: every second that lies in some piece, counted once."""
    seconds = 0.0
    reached = None
    for start, end in sorted((piece[0], piece[5]) for piece in pieces):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            seconds += (end - begin).total_seconds()
        reached = end if reached is None else max(reached, end)
    return min(seconds / 86_400, 1.0)


def _diagonal_km(pieces: list[Any]) -> float:
    lats = [math.radians(piece[6]) for piece in pieces]
    lons = [math.radians(piece[7]) for piece in pieces]
    a = math.sin((max(lats) - min(lats)) / 2) ** 2
    b = math.cos(min(lats)) * math.cos(max(lats)) * math.sin((max(lons) - min(lons)) / 2) ** 2
    return 2 * 6371.0088 * math.asin(math.sqrt(a + b))
