"""The paper's preprocessing (appendix, "Preprocessing pipeline") as Ibis expressions.

They mean the same on every engine: times are local seconds since 1970 and days are whole numbers of
86,400 seconds, so no calendar, time zone or rounding of an engine matters. Each step is a function
from tables to a table; `pipeline` decides when it is evaluated.
"""

import math
from datetime import date

import ibis
from ibis import ir

from mobatlas.config import AnchorConfig, PrepareConfig, SplitConfig, WindowConfig
from mobatlas.data.dataset import split_thresholds
from mobatlas.data.prepare.tables import nearest_whole
from mobatlas.data.types import DAY, EARTH_KM, HOME, OTHER, WORK

HOUR = 3_600
# Coordinates are averaged as whole 1e-7 degrees (1 cm), because sums of integers do not depend on
# the order of the rows.
DEGREES = 10_000_000
# Why a window is dropped; the first reason that applies counts.
REASONS = ("unreliable", "coverage", "short", "anchors")
IN_ORDER = ("user", "window", "arrival", "start", "end", "token")


def whole_degrees(degrees: ir.Value) -> ir.Value:
    """Degrees as whole 1e-7 degrees."""
    return nearest_whole(degrees * DEGREES)


def number_users(visits: ir.Table, config: SplitConfig) -> ir.Table:
    """Every user once, numbered in the order of ids, with the split by the hash of the id."""
    users = visits.select("user_id").distinct()
    digest = (ibis.literal(f"{config.salt}:") + users.user_id).hexdigest("md5").substr(0, 8)
    val, test = split_thresholds(config)
    split = ibis.cases((digest < val, "train"), (digest < test, "val"), else_="test")
    return users.mutate(user=ibis.row_number().over(order_by=users.user_id), split=split)


def number_places(visits: ir.Table) -> ir.Table:
    """Every POI once, numbered in the order of ids, at the mean of its coordinates."""
    known = visits.filter(visits.poi_id.notnull())
    places = known.group_by("poi_id").aggregate(
        n=known.count(),
        lat_sum=whole_degrees(known.lat).sum(),
        lon_sum=whole_degrees(known.lon).sum(),
    )
    return places.select(
        "poi_id",
        poi=ibis.row_number().over(order_by=places.poi_id),
        lat=places.lat_sum.cast("float64") / places.n / DEGREES,
        lon=places.lon_sum.cast("float64") / places.n / DEGREES,
    )


def encode(visits: ir.Table, users: ir.Table, places: ir.Table) -> ir.Table:
    """Distinct visits as numbers only, which sort and spill several times faster than text."""
    of_users = visits.join(users.select("user_id", "user"), "user_id")
    encoded = of_users.left_join(
        places.select(place_id="poi_id", poi="poi"), of_users.poi_id == places.poi_id
    )
    return encoded.select("user", "poi", "lat", "lon", "start", "end", "home", "work").distinct()


def fill_departures(visits: ir.Table, config: PrepareConfig) -> ir.Table:
    """Make a visit without departure an instant, or end it at the next arrival or after a limit."""
    if config.missing_departure == "instant":
        return visits.mutate(end=ibis.coalesce(visits.end, visits.start))
    moments = visits.select("user", "start").distinct()
    later = moments.start.lead().over(ibis.window(group_by="user", order_by="start"))
    joined = visits.join(moments.mutate(following=later), ["user", "start"])
    cap = joined.start + int(config.max_gap_hours * HOUR)
    return joined.mutate(
        end=ibis.coalesce(joined.end, ibis.least(ibis.coalesce(joined.following, cap), cap))
    ).drop("following")


def split_at_midnights(visits: ir.Table) -> ir.Table:
    """One piece for each day that a visit touches; an end at midnight does not touch the next."""
    first = visits.start // DAY
    last = ibis.greatest(first, (visits.end - 1) // DAY)
    days = visits.mutate(day=ibis.range(first, last + 1).unnest())
    midnight = days.day * DAY
    return days.mutate(
        piece_start=ibis.greatest(days.start, midnight),
        piece_end=ibis.least(days.end, midnight + DAY),
    )


def infer_anchors(visits: ir.Table, config: AnchorConfig, which: tuple[str, ...]) -> ir.Table:
    """The home and work of each user: the modal place at night, and in weekday working hours.

    Places are ranked by seconds observed in those hours, then by days, then by id, so that
    check-ins without departures are ranked by days. Work is never a place flagged as home.
    """
    pieces = split_at_midnights(visits.filter(visits.poi.notnull()))
    since_midnight = pieces.piece_start - pieces.day * DAY
    until = pieces.piece_end - pieces.day * DAY
    night_seconds, at_night = _overlap(since_midnight, until, config.night)
    homes = pieces.filter(at_night & ("home" in which)).mutate(seconds=night_seconds)
    home = _modal_place(homes, config.min_days).rename(home_poi="poi")
    work_seconds, in_hours = _overlap(since_midnight, until, config.working_hours)
    weekday = (pieces.day + 3) % 7 < 5  # day 0 was a Thursday
    not_home = ibis.literal("home" in which) | ~pieces.home
    candidates = pieces.filter(in_hours & weekday & not_home & ("work" in which))
    away = (
        candidates.mutate(seconds=work_seconds)
        .left_join(home, "user")
        .filter(lambda t: t.home_poi.isnull() | (t.home_poi != t.poi))
    )
    joined = home.outer_join(_modal_place(away, config.min_days).rename(work_poi="poi"), "user")
    return joined.select(
        user=ibis.coalesce(joined.user, joined.user_right), home_poi="home_poi", work_poi="work_poi"
    )


def _overlap(start: ir.Value, end: ir.Value, hours: tuple[int, int]) -> tuple[ir.Value, ir.Value]:
    """Seconds of a piece within hours that may span midnight, and whether it touches them."""
    opening, closing = (hour * HOUR for hour in hours)
    spans = [(opening, closing)] if opening < closing else [(0, closing), (opening, DAY)]
    seconds = ibis.literal(0)
    touches = ibis.literal(False)
    for begin, finish in spans:
        overlap = ibis.least(end, finish) - ibis.greatest(start, begin)
        seconds = seconds + ibis.greatest(overlap, 0)
        touches = touches | ((start < finish) & ((end > begin) | (start >= begin)))
    return seconds, touches


def _modal_place(pieces: ir.Table, min_days: int) -> ir.Table:
    places = pieces.group_by(["user", "poi"]).aggregate(
        seconds=pieces.seconds.sum(), days=pieces.day.nunique()
    )
    often = places.filter(places.days >= min_days)
    return first_by(often, "user", [often.seconds.desc(), often.days.desc(), often.poi]).select(
        "user", "poi"
    )


def flag_anchors(
    visits: ir.Table,
    inferred: ir.Table,
    anchors: ir.Table | None,
    which: tuple[str, ...],
    config: AnchorConfig,
) -> ir.Table:
    """Flag visits near the anchor in the people table, else at the inferred place.

    A flag of the source without a place id stays.
    """
    joined = visits.left_join(inferred, "user").drop("user_right")
    if anchors is not None:
        joined = joined.left_join(anchors, "user").drop("user_right")
    flags = {}
    for place in which:
        at_place = (joined.poi == joined[f"{place}_poi"]).fill_null(False)
        if anchors is not None:
            lat = joined[f"{place}_lat"]
            lon = joined[f"{place}_lon"]
            metres = _flat_metres(joined.lat, joined.lon, lat, lon)
            near = (metres <= config.radius_metres).fill_null(False)
            at_place = ibis.ifelse(lat.notnull() & lon.notnull(), near, at_place)
        flags[place] = at_place | (joined[place] & joined.poi.isnull())
    return joined.select(*[name for name in visits.columns if name not in which], **flags)


def _flat_metres(
    lat: ir.Value, lon: ir.Value, other_lat: ir.Value, other_lon: ir.Value
) -> ir.Value:
    """Distance over a few hundred metres, where Earth is flat enough."""
    degree = EARTH_KM * 1000 * math.pi / 180
    north = (lat - other_lat) * degree
    east = (lon - other_lon) * degree * other_lat.radians().cos()
    return (north * north + east * east).sqrt()


def tokenise(visits: ir.Table, tokens: ir.Table) -> ir.Table:
    """HOME, WORK, the POI's own token, or OTHER; `tokens` maps POI numbers to tokens."""
    joined = visits.left_join(tokens.select(known="poi", own="token"), visits.poi == tokens.poi)
    token = ibis.cases(
        (joined.home, HOME), (joined.work, WORK), else_=ibis.coalesce(joined.own, OTHER)
    )
    return joined.select("user", "start", "end", "lat", "lon", token=token.cast("int32"))


def compare_neighbours(pieces: ir.Table) -> ir.Table:
    """Mark pieces that change the token or open a day, and count the seconds they newly observe.

    One pass in time order serves run lengths, day boundaries and coverage; overlapping time counts
    once.
    """
    order = {"group_by": "user", "order_by": ["piece_start", "start", "end", "token"]}
    before = ibis.window(**order)
    seen_until = pieces.piece_end.max().over(ibis.window(**order, preceding=(None, 1)))
    since = ibis.greatest(pieces.piece_start, ibis.coalesce(seen_until, pieces.piece_start))
    return pieces.mutate(
        changes=(pieces.token != pieces.token.lag().over(before)).fill_null(True).cast("int64"),
        opens_day=(pieces.day != pieces.day.lag().over(before)).fill_null(True).cast("int64"),
        observed=ibis.greatest(pieces.piece_end - since, 0),
    )


def judge_days(pieces: ir.Table, config: PrepareConfig) -> ir.Table:
    """Per user and day: reliability, coverage, and how many runs of tokens begin in it."""
    days = pieces.group_by(["user", "day"]).aggregate(
        observed=pieces.observed.sum(),
        visits=pieces.count(),
        overlapping=(pieces.piece_end - pieces.piece_start > pieces.observed).sum(),
        south=pieces.lat.min(),
        north=pieces.lat.max(),
        west=pieces.lon.min(),
        east=pieces.lon.max(),
        changes=pieces.changes.sum(),
        # 0 if the day continues the last token of the day before
        opening_change=(pieces.changes * pieces.opens_day).sum(),
    )
    width = days.east - days.west
    # a day across the antimeridian does not span the world
    km = _haversine_km(days.south, days.north, ibis.least(width, 360 - width))
    needed = math.ceil(config.quality.min_coverage * DAY)
    return days.select(
        "user",
        "day",
        "changes",
        "opening_change",
        "visits",
        "overlapping",
        unreliable=(km > config.quality.max_day_km).cast("int64"),
        covered=(ibis.least(days.observed, DAY) >= needed).cast("int64"),
    )


def _haversine_km(south: ir.Value, north: ir.Value, width: ir.Value) -> ir.Value:
    phi = (north.radians() - south.radians()) / 2
    theta = width.radians() / 2
    h = (
        phi.sin() * phi.sin()
        + south.radians().cos() * north.radians().cos() * theta.sin() * theta.sin()
    )
    return 2 * EARTH_KM * ibis.least(h, 1.0).sqrt().asin()


def in_windows(days: ir.Table, origins: ir.Table | None, config: WindowConfig) -> ir.Table:
    """Each row once per window of its day; window k begins `k * stride` days after the origin."""
    if origins is None:
        assert isinstance(config.origin, date)
        relative = days.mutate(since=days.day - (config.origin - date(1970, 1, 1)).days)
    else:
        joined = days.join(origins, "user")
        relative = joined.mutate(since=joined.day - joined.origin).drop("origin")
    overlaps = range(math.ceil(config.days / config.stride))
    repeated = relative.mutate(back=ibis.array(list(overlaps)).unnest())
    placed = repeated.mutate(window=repeated.since // config.stride - repeated.back)
    inside = (placed.window >= 0) & (placed.since - placed.window * config.stride < config.days)
    return placed.filter(inside).drop("since", "back")


def judge_windows(days: ir.Table, users: ir.Table, config: PrepareConfig) -> ir.Table:
    """Every window with an observed day, and the reason why it is dropped (null: it is kept)."""
    quality = config.quality
    length = config.window.days
    windows = days.group_by(["user", "window"]).aggregate(
        unreliable=days.unreliable.sum(),
        covered=days.covered.sum(),
        observed_days=days.count(),
        # the first piece of a window begins a token, even if it continues an earlier one
        tokens=days.changes.sum() + 1 - days.opening_change.argmin(days.day),
    )
    if quality.min_coverage == 0:  # a day without a visit is then covered as well
        windows = windows.mutate(covered=ibis.literal(length))
    windows = windows.join(users.select("user", "eligible"), "user")
    # in whole days, without binary fractions: 0.1 * 30 is not 3.0000000000000004
    allowed = math.floor(round(quality.max_unreliable * length, 9))
    needed = math.ceil(round(quality.min_high_quality * length, 9))
    reason = ibis.cases(
        (windows.unreliable > allowed, "unreliable"),
        (windows.covered < needed, "coverage"),
        (windows.tokens < quality.min_tokens, "short"),
        (~windows.eligible, "anchors"),
        else_=ibis.null("string"),
    )
    return windows.select("user", "window", reason=reason)


def assemble(pieces: ir.Table, kept: ir.Table) -> ir.Table:
    """The pieces of the windows that are kept."""
    return pieces.join(kept, ["user", "window"]).select(
        "user", "window", "token", "start", "end", arrival="piece_start", departure="piece_end"
    )


def count_visitors(visits: ir.Table, fewest: int) -> ir.Table:
    """The visits of each POI, and whether it is rare: visited by fewer people than `fewest`."""
    of_pois = visits.filter(~visits.home & ~visits.work)
    counted = of_pois.group_by("poi").aggregate(
        visits=of_pois.count(), people=of_pois.user.nunique()
    )
    return counted.select("poi", "visits", rare=counted.people < fewest)


def most_frequent(counted: ir.Table, places: ir.Table, size: int) -> ir.Table:
    """The POIs with most visits that are not rare, with coordinates; ties are broken by id."""
    known = counted.filter(~counted.rare)
    frequent = known.order_by([known.visits.desc(), known.poi]).limit(size)
    return frequent.join(places, "poi").select("poi", "poi_id", "visits", "lat", "lon")


def modal_categories(visits: ir.Table, frequent: ir.Table) -> ir.Table:
    """The most frequent category of each of these POIs; ties are broken by name."""
    named = visits.filter(visits.category.notnull()).semi_join(frequent, "poi_id")
    counted = named.group_by(["poi_id", "category"]).aggregate(n=lambda t: t.count())
    return first_by(counted, "poi_id", [counted.n.desc(), counted.category]).drop("n")


def first_by(rows: ir.Table, key: str, order: list[ir.Value]) -> ir.Table:
    """The first row of each key in that order."""
    ranked = rows.mutate(rank=ibis.row_number().over(ibis.window(group_by=key, order_by=order)))
    return ranked.filter(ranked["rank"] == 0).drop("rank")
