"""The paper's preprocessing (appendix, "Preprocessing pipeline") as Ibis expressions, the same for every engine.

Times are seconds of the local clock since 1970, days are whole numbers of 86,400 seconds since then: no engine's calendar,
time zone or rounding takes part. Every step is a function from tables to a table; `prepare` decides what is evaluated when.
"""

from __future__ import annotations

import math
from datetime import date

import ibis
from ibis import ir

from mobatlas.config import AnchorConfig, PrepareConfig, SplitConfig, WindowConfig
from mobatlas.data.canonical import DAY
from mobatlas.data.vocabulary import HOME, OTHER, WORK

EARTH_KM = 6371.0088
HOUR = 3_600
SPLITS = ("train", "val", "test")
# Why a window falls, in the order in which the reasons are asked.
REASONS = ("unreliable", "coverage", "short", "anchors")


def split_thresholds(config: SplitConfig) -> tuple[str, str]:
    """The hexadecimal hashes at which validation and test people begin."""
    return tuple(f"{min(round(share * 16**8), 16**8 - 1):08x}" for share in (config.train, config.train + config.val))  # type: ignore[return-value]


def number_users(visits: ir.Table, config: SplitConfig) -> ir.Table:
    """Everybody once, numbered in the order of their ids, with the split that the hash of the id gives."""
    users = visits.select("user_id").distinct()
    digest = (ibis.literal(f"{config.salt}:") + users.user_id).hexdigest("md5").substr(0, 8)
    val, test = split_thresholds(config)
    split = (
        ibis.cases((digest < val, "train"), else_="test")
        if val == test
        else ibis.cases((digest < val, "train"), (digest < test, "val"), else_="test")
    )
    return users.mutate(user=ibis.row_number().over(order_by=users.user_id), split=split)


def fill_departures(visits: ir.Table, config: PrepareConfig) -> ir.Table:
    """A visit without departure is an instant, or lasts until the next arrival, at most `max_gap_hours`."""
    if config.missing_departure == "instant":
        return visits.mutate(end=ibis.coalesce(visits.end, visits.start))
    order = ibis.window(group_by="user_id", order_by=["start", "poi_id"])
    cap = visits.start + int(config.max_gap_hours * HOUR)
    following = visits.start.lead().over(order)
    return visits.mutate(end=ibis.coalesce(visits.end, ibis.least(ibis.coalesce(following, cap), cap)))


def observe(visits: ir.Table, users: ir.Table) -> ir.Table:
    """Visits with the user's number; `repeated` marks exact duplicates, `fresh` where time not yet observed begins."""
    numbered = visits.join(users.select("user_id", "user"), "user_id").drop("user_id")
    content = ["start", "end", "poi_id", "lat", "lon", "category", "home", "work"]
    in_order = ibis.window(group_by="user", order_by=content)
    before = ibis.window(group_by="user", order_by=content, preceding=(None, 1))
    same = ibis.literal(True)
    for name in content:
        same = same & numbered[name].identical_to(numbered[name].lag().over(in_order))
    first = ibis.row_number().over(in_order) == 0
    seen_until = numbered.end.max().over(before)
    return numbered.mutate(
        repeated=same & ~first, fresh=ibis.greatest(numbered.start, ibis.coalesce(seen_until, numbered.start))
    )


def split_at_midnights(visits: ir.Table) -> ir.Table:
    """One piece for each calendar day that a visit touches; a stay that ends at midnight does not touch the next day."""
    first = visits.start // DAY
    last = ibis.greatest(first, (visits.end - 1) // DAY)
    days = visits.mutate(day=ibis.range(first, last + 1).unnest())
    midnight = days.day * DAY
    piece_start = ibis.greatest(days.start, midnight)
    piece_end = ibis.least(days.end, midnight + DAY)
    observed = piece_end - ibis.greatest(piece_start, days.fresh)
    return days.mutate(piece_start=piece_start, piece_end=piece_end, observed=ibis.greatest(observed, 0))


def infer_anchors(visits: ir.Table, config: AnchorConfig) -> ir.Table:
    """Home and work of each user: the modal place at night, and another one in working hours on weekdays.

    Places are ranked by seconds observed in those hours, then by days, then by id, so that check-ins without
    departures are ranked by days.
    """
    pieces = split_at_midnights(visits.filter(visits.poi_id.notnull()))
    since_midnight = pieces.piece_start - pieces.day * DAY
    until = pieces.piece_end - pieces.day * DAY
    weekday = (pieces.day + 3) % 7 < 5  # day 0 was a Thursday
    night_seconds, night = _overlap(since_midnight, until, config.night)
    work_seconds, working = _overlap(since_midnight, until, config.working_hours)
    home = _modal_place(pieces.filter(night).mutate(seconds=night_seconds), config.min_days).rename(home_poi="poi_id")
    office = pieces.filter(working & weekday).mutate(seconds=work_seconds)
    away = office.left_join(home, "user").filter(lambda t: t.home_poi.isnull() | (t.home_poi != t.poi_id))
    work = _modal_place(away, config.min_days).rename(work_poi="poi_id")
    joined = home.outer_join(work, "user")
    return joined.select(user=ibis.coalesce(joined.user, joined.user_right), home_poi="home_poi", work_poi="work_poi")


def _overlap(start: ir.Value, end: ir.Value, hours: tuple[int, int]) -> tuple[ir.Value, ir.Value]:
    """Seconds of a piece within hours of the day that may wrap around midnight, and whether it touches them at all."""
    opening, closing = hours
    spans = [(opening, closing)] if opening < closing else [(0, closing), (opening, 24)]
    seconds = ibis.literal(0)
    touches = ibis.literal(False)
    for begin, finish in spans:
        seconds = seconds + ibis.greatest(ibis.least(end, finish * HOUR) - ibis.greatest(start, begin * HOUR), 0)
        touches = touches | ((start < finish * HOUR) & ((end > begin * HOUR) | (start >= begin * HOUR)))
    return seconds, touches


def _modal_place(pieces: ir.Table, min_days: int) -> ir.Table:
    places = pieces.group_by(["user", "poi_id"]).aggregate(seconds=pieces.seconds.sum(), days=pieces.day.nunique())
    often = places.filter(places.days >= min_days)
    order = ibis.window(group_by="user", order_by=[often.seconds.desc(), often.days.desc(), often.poi_id])
    ranked = often.mutate(rank=ibis.row_number().over(order))
    return ranked.filter(ranked["rank"] == 0).select("user", "poi_id")


def flag_anchors(visits: ir.Table, anchors: ir.Table, which: tuple[str, ...]) -> ir.Table:
    """Visits to an inferred place carry its flag; `which` of home and work were asked for."""
    joined = visits.left_join(anchors, "user")
    flags = {place: (joined.poi_id == joined[f"{place}_poi"]).fill_null(False) for place in which}
    return joined.select(*[name for name in visits.columns if name not in which], **flags)


def tokenise(visits: ir.Table, vocabulary: ir.Table) -> ir.Table:
    """HOME, WORK, the POI's own token, or OTHER."""
    known = vocabulary.select(known_poi="poi_id", known_token=vocabulary.token.cast("int64"))
    joined = visits.left_join(known, visits.poi_id == known.known_poi)
    token = ibis.cases((joined.home, HOME), (joined.work, WORK), else_=ibis.coalesce(joined.known_token, OTHER))
    return joined.select("user", "start", "end", "fresh", "lat", "lon", token=token.cast("int32"))


def collapse_runs(pieces: ir.Table) -> ir.Table:
    """Run-length encoding: consecutive pieces of one token share a run number; one row per user, run and day.

    Runs are numbered over the whole life of a user. A window is a stretch of days, so its runs are consecutive numbers,
    and its first piece begins its first run: windows need no second pass.
    """
    order = ibis.window(group_by="user", order_by=["piece_start", "start", "end", "token"])
    changed = pieces.mutate(changed=(pieces.token != pieces.token.lag().over(order)).fill_null(True).cast("int64"))
    so_far = ibis.window(
        group_by="user", order_by=["piece_start", "start", "end", "token"], preceding=None, following=0
    )
    numbered = changed.mutate(run=changed.changed.sum().over(so_far))
    return numbered.group_by(["user", "day", "run", "token"]).aggregate(
        arrival=numbered.piece_start.min(),
        departure=numbered.piece_end.max(),
        observed=numbered.observed.sum(),
        south=numbered.lat.min(),
        north=numbered.lat.max(),
        west=numbered.lon.min(),
        east=numbered.lon.max(),
    )


def judge_days(runs: ir.Table, config: PrepareConfig) -> ir.Table:
    """Per user and day: is it spatially reliable, is it high quality, and which runs does it hold."""
    days = runs.group_by(["user", "day"]).aggregate(
        observed=runs.observed.sum(),
        south=runs.south.min(),
        north=runs.north.max(),
        west=runs.west.min(),
        east=runs.east.max(),
        first_run=runs.run.min(),
        last_run=runs.run.max(),
    )
    width = days.east - days.west
    shorter = ibis.least(width, 360 - width)  # a day around the antimeridian is not a day around the world
    km = _haversine(days.south, days.north, shorter)
    needed = math.ceil(config.quality.min_coverage * DAY)
    return days.select(
        "user",
        "day",
        "first_run",
        "last_run",
        unreliable=(km > config.quality.max_day_km).cast("int64"),
        covered=(ibis.least(days.observed, DAY) >= needed).cast("int64"),
    )


def _haversine(south: ir.Value, north: ir.Value, width: ir.Value) -> ir.Value:
    phi = (north.radians() - south.radians()) / 2
    theta = width.radians() / 2
    h = phi.sin() * phi.sin() + south.radians().cos() * north.radians().cos() * theta.sin() * theta.sin()
    return 2 * EARTH_KM * ibis.least(h, 1.0).sqrt().asin()


def in_windows(days: ir.Table, origins: ir.Table | None, config: WindowConfig) -> ir.Table:
    """Each row once for every window that its day belongs to; `window` k begins `k * stride` days after the origin."""
    if origins is None:
        assert isinstance(config.origin, date)
        relative = days.mutate(since=days.day - (config.origin - date(1970, 1, 1)).days)
    else:
        joined = days.join(origins, "user")
        relative = joined.mutate(since=joined.day - joined.origin).drop("origin")
    overlap = math.ceil(config.days / config.stride)
    placed = relative.mutate(back=ibis.array(list(range(overlap))).unnest())
    placed = placed.mutate(window=placed.since // config.stride - placed.back)
    inside = (placed.window >= 0) & (placed.since - placed.window * config.stride < config.days)
    return placed.filter(inside).drop("since", "back")


def judge_windows(days: ir.Table, users: ir.Table, config: PrepareConfig) -> ir.Table:
    """Every window with an observed day, how long its trajectory is, and why it falls (null: it is kept)."""
    quality, length = config.quality, config.window.days
    windows = days.group_by(["user", "window"]).aggregate(
        unreliable=days.unreliable.sum(),
        covered=days.covered.sum(),
        observed_days=days.count(),
        first_run=days.first_run.min(),
        tokens=days.last_run.max() - days.first_run.min() + 1,
    )
    if quality.min_coverage == 0:  # a day without a visit has coverage 0, and that is enough
        windows = windows.mutate(covered=ibis.literal(length))
    windows = windows.join(users.select("user", "split", "eligible"), "user")
    # at most 10 % and at least 80 % of the days, in whole days and without binary fractions: 0.1 * 30 is not 3.0000000000000004
    allowed = math.floor(round(quality.max_unreliable * length, 9))
    needed = math.ceil(round(quality.min_high_quality * length, 9))
    reason = ibis.cases(
        (windows.unreliable > allowed, "unreliable"),
        (windows.covered < needed, "coverage"),
        (windows.tokens < quality.min_tokens, "short"),
        (~windows.eligible, "anchors"),
        else_=ibis.null("string"),
    )
    return windows.select("user", "window", "split", "first_run", "tokens", reason=reason)


def assemble(runs: ir.Table, windows: ir.Table) -> ir.Table:
    """The trajectories in long form: user, window, position, token, arrival, departure."""
    kept = windows.filter(windows.reason.isnull()).select("user", "window", "first_run")
    joined = runs.join(kept, ["user", "window"])
    placed = joined.mutate(position=joined.run - joined.first_run)
    return placed.group_by(["user", "window", "position"]).aggregate(
        token=placed.token.min(), arrival=placed.arrival.min(), departure=placed.departure.max()
    )
