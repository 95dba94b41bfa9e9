"""The next-POI predictor: what it can learn, its scores against slow counts, early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.next_poi import (
    NEXT_POI_METRICS,
    PROFILES,
    NextPoiConfig,
    NextPoiNetwork,
    Predictor,
    next_poi_config,
    score_predictor,
    train_predictor,
)
from mobatlas import MobatlasError
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import (
    FIRST_POI,
    HOME,
    MASK,
    OTHER,
    PAD,
    WORK,
    Vocabulary,
    build_vocabulary,
)
from mobatlas.progress import Tracker
from tests.small_town import CAFE, PARK, SHOP, TOWN, walks

DEGREE_KM = 6371.0088 * math.pi / 180
NAN = math.nan
TINY: dict[str, Any] = {
    "embedding": 16,
    "hidden": 16,
    "learning_rate": 0.02,
    "batch": 32,
    "steps": 200,
}
POIS = 20


def tiny(**changes: Any) -> NextPoiConfig:
    return next_poi_config("full", TINY | {"validate_every": 20} | changes)


def places(n: int = POIS) -> Vocabulary:
    """POIs along the equator, a tenth of a degree apart."""
    rows = range(n)
    return build_vocabulary(
        pa.table(
            {
                "poi_id": [f"p{row}" for row in rows],
                "lat": [0.0] * n,
                "lon": [row / 10 for row in rows],
                "category": ["place"] * n,
                "visits": [1] * n,
            }
        )
    )


def rounds(n: int, seed: int) -> Trajectories:
    """Round and round through HOME, WORK, OTHER and nine POIs, from anywhere."""
    rng = np.random.default_rng(seed)
    starts, lengths = rng.integers(12, size=n), rng.integers(1, 10, size=n)
    return walks(
        *(
            [HOME + (start + step) % 12 for step in range(length)]
            for start, length in zip(starts, lengths, strict=True)
        )
    )


def lottery(n: int, seed: int) -> Trajectories:
    """Each visit drawn by itself: 40 % go to the park, the others anywhere."""
    rng = np.random.default_rng(seed)
    drawn = np.where(
        rng.random((n, 8)) < 0.4, PARK, rng.integers(HOME, FIRST_POI + POIS, size=(n, 8))
    )
    return walks(*drawn.tolist())


def untrained(vocabulary: Vocabulary, seed: int = 0) -> Predictor:
    torch.manual_seed(seed)
    return known(NextPoiNetwork(tiny(), len(vocabulary)).eval(), vocabulary)


def known(network: nn.Module, vocabulary: Vocabulary) -> Predictor:
    return Predictor(network, vocabulary, learnt=1, steps=1, best_step=1, losses=(1.0,))


class AfterEach(nn.Module):
    """Tells what follows each token, likeliest first, whatever was before it."""

    def __init__(self, following: dict[int, Sequence[int]], vocabulary: Vocabulary) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(len(vocabulary), len(vocabulary) - HOME))
        for token, ranked in following.items():
            for place, other in enumerate(ranked):
                self.table.data[token, other - HOME] = len(vocabulary) - place

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens[:, :-1][tokens[:, 1:] != PAD]]


def slow_km(a: Sequence[float], b: Sequence[float]) -> float:
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(math.radians, place)) for place in (a, b))
    h = (
        math.sin((lat_b - lat_a) / 2) ** 2
        + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
    )
    return 2 * 6371.0088 * math.atan2(math.sqrt(h), math.sqrt(1 - h))


def slow_place(
    token: int, anchors: Sequence[float], vocabulary: Vocabulary
) -> Sequence[float] | None:
    if token in (HOME, WORK):
        place = list(anchors[:2] if token == HOME else anchors[2:])
    else:
        row = vocabulary.table.slice(token, 1).to_pylist()[0]
        place = [NAN if row[name] is None else row[name] for name in ("lat", "lon")]
    return None if any(map(math.isnan, place)) else place


def slow_scores(predictor: Predictor, trajectories: Trajectories) -> dict[str, float]:
    """One history at a time, all tokens sorted."""
    hits, top, gains, km, pois, poi_top = [], [], [], [], [], []
    for number, (start, end) in enumerate(pairwise(trajectories.offsets.tolist())):
        walk, anchors = (
            trajectories.tokens[start:end].tolist(),
            trajectories.anchors[number].tolist(),
        )
        for seen in range(1, len(walk)):
            with torch.no_grad():
                scores = predictor.network(torch.tensor([walk[: seen + 1]]))[-1].tolist()
            order = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
            ranked, true = [column + HOME for column in order], walk[seen]
            place = ranked.index(true) + 1
            hits.append(place == 1)
            top.append(place <= 10)
            gains.append(1 / math.log2(1 + place) if place <= 10 else 0.0)
            there = slow_place(true, anchors, predictor.vocabulary)
            found = (slow_place(token, anchors, predictor.vocabulary) for token in ranked)
            if there is not None:
                km.append(slow_km(next(one for one in found if one is not None), there))
            if true >= FIRST_POI:
                among = [token for token in ranked if token >= FIRST_POI].index(true) + 1
                pois.append(among == 1)
                poi_top.append(among <= 10)
    means: dict[str, Sequence[float]] = {
        "accuracy": hits,
        "hr10": top,
        "ndcg10": gains,
        "geo_error_km": km,
    }
    means |= {"poi_accuracy": pois, "poi_hr10": poi_top}
    counts = {"predictions": len(hits), "located": len(km), "pois": len(pois)}
    return {name: float(np.mean(values)) for name, values in means.items()} | counts


def random_walks(seed: int, n: int = 60) -> Trajectories:
    rng = np.random.default_rng(seed)
    tokens = [
        rng.integers(HOME, FIRST_POI + POIS, size=size).tolist()
        for size in rng.integers(0, 9, size=n)
    ]
    anchors = rng.uniform(-1, 1, size=(n, 4))
    anchors[::4, :2] = anchors[::3, 2:] = NAN
    return walks(*tokens, anchors=anchors.tolist())


def weights(predictor: Predictor) -> list[Tensor]:
    return list(predictor.network.state_dict().values())


def equal(a: Predictor, b: Predictor) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def test_a_language_that_goes_round_is_learnt() -> None:
    predictor = train_predictor(rounds(300, 0), rounds(60, 1), tiny(), places())
    scores = score_predictor(predictor, rounds(100, 2)).as_dict()
    assert min(scores["accuracy"], scores["poi_accuracy"]) > 0.99
    assert scores["accuracy"] <= scores["ndcg10"] <= scores["hr10"] == 1
    assert scores["geo_error_km"] < 1


def test_of_visits_by_chance_only_the_most_frequent_place_is_predicted() -> None:
    test = lottery(400, 2)
    predictor = train_predictor(lottery(400, 0), lottery(200, 1), tiny(steps=100), places())
    often = np.mean(test.tokens.reshape(-1, 8)[:, 1:] == PARK)
    assert score_predictor(predictor, test).accuracy == pytest.approx(often, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_every_score_is_what_a_slow_count_finds(seed: int) -> None:
    predictor, test = untrained(places(), seed), random_walks(seed)
    found = score_predictor(predictor, test).as_dict()
    assert found == pytest.approx(slow_scores(predictor, test))
    assert 0 < found["located"] < found["predictions"] and 0 < found["hr10"] < 1


def test_ties_are_settled_by_the_number_of_the_token() -> None:
    undecided = known(AfterEach({}, places()), places())
    test = random_walks(0)
    assert score_predictor(undecided, test).as_dict() == pytest.approx(slow_scores(undecided, test))
    assert score_predictor(undecided, walks([PARK, HOME])).accuracy == 1
    assert score_predictor(undecided, walks([PARK, WORK])).accuracy == 0


def test_the_error_in_kilometres_is_what_a_map_says() -> None:
    """The park is at (0, 0), the shop at (2, 0), home at (1, 0) and work at (0, 3), in degrees."""
    oracle = known(
        AfterEach(
            {PARK: [HOME], SHOP: [PARK], HOME: [PARK], WORK: [OTHER, PARK], CAFE: [WORK]},
            TOWN.vocabulary,
        ),
        TOWN.vocabulary,
    )
    anchors = (1.0, 0.0, 0.0, 3.0)

    def degrees(walk: Sequence[int], anchors: Sequence[float] = anchors) -> float | None:
        km = score_predictor(oracle, walks(walk, anchors=[anchors])).geo_error_km
        return None if km is None else km / DEGREE_KM

    assert degrees([PARK, SHOP]) == pytest.approx(1)  # home instead of the shop
    assert degrees([SHOP, HOME]) == pytest.approx(1)  # the park instead of home
    assert degrees([HOME, WORK]) == pytest.approx(3)  # the park instead of work
    assert degrees([CAFE, PARK]) == pytest.approx(3)  # work instead of the park
    assert degrees([PARK, HOME]) == degrees([CAFE, WORK]) == 0  # right
    assert degrees([PARK, SHOP, HOME, WORK]) == pytest.approx((1 + 1 + 3) / 3)
    assert degrees([PARK, OTHER]) is None  # nobody knows where that is
    assert degrees([WORK, SHOP]) == pytest.approx(2)  # the park, since OTHER is nowhere
    assert degrees([PARK, HOME], (NAN, NAN, 0.0, 3.0)) is None
    assert degrees([HOME, WORK, SHOP], (1.0, 0.0, NAN, NAN)) == pytest.approx(2)
    missed = score_predictor(oracle, walks([WORK, SHOP], [PARK, OTHER], anchors=[anchors] * 2))
    assert (missed.accuracy, missed.predictions, missed.located, missed.pois) == (0, 2, 1, 1)


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    config, data = tiny(steps=30), (rounds(80, 0), rounds(20, 1))
    before = torch.random.get_rng_state()
    first = train_predictor(*data, config, places(), 7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again = train_predictor(*data, config, places(), 7)
    assert equal(first, again) and first.losses == again.losses
    assert not equal(first, train_predictor(*data, config, places(), 8))


def test_dropout_is_of_the_step_and_not_of_how_often_one_validates() -> None:
    data = (rounds(80, 0), rounds(20, 1))
    often, once = (
        train_predictor(*data, tiny(steps=12, validate_every=every, dropout=0.5), places())
        for every in (2, 12)
    )
    assert often.best_step == often.steps == once.steps == 12
    assert equal(often, once)


def test_the_weights_that_were_best_for_validation_people_are_kept() -> None:
    """Few walks by chance are soon known by heart."""
    validation, config = lottery(100, 1), tiny(validate_every=5, patience=3, dropout=0.0)
    predictor = train_predictor(lottery(20, 0), validation, config, places())
    best = int(np.argmin(predictor.losses))
    assert predictor.steps < config.steps
    assert len(predictor.losses) - 1 - best == 3
    assert (predictor.best_step, predictor.steps) == (5 * (best + 1), 5 * len(predictor.losses))
    tokens = torch.from_numpy(validation.tokens.astype(np.int64).reshape(-1, 8))
    with torch.no_grad():
        loss = F.cross_entropy(predictor.network(tokens), tokens[:, 1:].flatten() - HOME)
    assert (
        predictor.validation_loss == min(predictor.losses) == pytest.approx(float(loss), rel=1e-5)
    )
    assert predictor.losses[-1] > 1.05 * predictor.validation_loss
    assert not predictor.network.training


def test_training_that_is_still_getting_better_uses_all_its_steps() -> None:
    predictor = train_predictor(
        rounds(80, 0), rounds(20, 1), tiny(steps=33, learning_rate=1e-3), places()
    )
    assert (predictor.steps, predictor.best_step, len(predictor.losses)) == (33, 33, 2)


def test_padding_never_counts() -> None:
    predictor, test = untrained(places()), random_walks(4)
    tokens = torch.tensor([[HOME, PARK, SHOP, CAFE], [WORK, PARK, PAD, PAD]])
    longer = F.pad(tokens, (0, 5), value=PAD)
    with torch.no_grad():
        scores = predictor.network(tokens)
        alone = torch.cat([predictor.network(tokens[:1]), predictor.network(tokens[1:, :2])])
        assert scores.shape == (3 + 1, len(places()) - HOME)  # nor is it predicted
        assert torch.allclose(scores, alone, atol=1e-6)
        assert torch.allclose(scores, predictor.network(longer), atol=1e-6)
    each = [
        score_predictor(predictor, test.take(np.array([number]))) for number in range(len(test))
    ]
    together = score_predictor(predictor, test)
    total = sum(one.predictions for one in each)
    assert together.predictions == total == np.maximum(np.diff(test.offsets) - 1, 0).sum()
    assert together.hr10 == pytest.approx(
        sum((one.hr10 or 0) * one.predictions for one in each) / total
    )


def test_a_trajectory_of_one_visit_asks_nothing() -> None:
    predictor = untrained(places())
    nothing = score_predictor(predictor, walks([HOME], [], [PARK])).as_dict()
    assert [nothing[name] for name in ("predictions", "located", "pois")] == [0, 0, 0]
    assert {nothing[name] for name in NEXT_POI_METRICS} == {None}
    pair = [HOME, PARK]
    assert score_predictor(predictor, walks([WORK], pair, [])) == score_predictor(
        predictor, walks(pair)
    )
    config = tiny(steps=3)
    with_singles = walks(*[[HOME], pair, [SHOP, CAFE]] * 5)
    without = walks(*[pair, [SHOP, CAFE]] * 5)
    both = [
        train_predictor(data, walks(pair), config, places()) for data in (with_singles, without)
    ]
    assert equal(*both)


def test_training_trajectories_are_cut_and_test_ones_are_not() -> None:
    long = walks(*[[HOME, PARK] * 6] * 4)
    predictor = train_predictor(long, walks([HOME, PARK]), tiny(steps=3, length=5), places())
    assert predictor.learnt == 4 * 4
    assert score_predictor(predictor, long).predictions == 4 * 11
    cut = walks(*[[HOME, PARK, HOME, PARK, HOME]] * 4)
    assert equal(predictor, train_predictor(cut, walks([HOME, PARK]), tiny(steps=3), places()))


def test_progress_is_reported_step_by_step() -> None:
    steps: list[tuple[float, str]] = []

    class Recorder:
        def step(self, done: float, note: str = "") -> None:
            steps.append((done, note))

    @contextmanager
    def progress(title: str, total: float) -> Iterator[Tracker]:
        steps.append((total, title))
        yield Recorder()

    train_predictor(rounds(30, 0), rounds(9, 1), tiny(steps=4), places(), progress=progress)
    assert steps[0] == (4, "training next-POI predictor")
    assert [done for done, _ in steps[1:]] == [1, 2, 3, 4]
    assert steps[-1][1].startswith("loss ")


def test_the_full_profile_is_the_papers() -> None:
    full, quick = (next_poi_config(name) for name in PROFILES)
    assert (full.embedding, full.layers, full.hidden, full.dropout, full.learning_rate) == (
        256,
        2,
        256,
        0.2,
        1e-4,
    )
    assert (quick.layers, quick.dropout) == (2, 0.2)
    assert quick.hidden < full.hidden and quick.steps < full.steps


GOOD = walks([HOME, PARK], [PARK, WORK])


@pytest.mark.parametrize(
    ("training", "validation", "sentence"),
    [
        (walks([HOME], []), GOOD, "training trajectories: none of 2 has two visits"),
        (GOOD, walks(), "validation trajectories: none of 0 has two visits"),
        (
            walks([HOME, FIRST_POI + POIS]),
            GOOD,
            "training trajectories: token 27 is no place of this vocabulary",
        ),
        (
            GOOD,
            walks([MASK, HOME]),
            "validation trajectories: token 3 is no place of this vocabulary",
        ),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(
    training: Trajectories, validation: Trajectories, sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence) as error:
        train_predictor(training, validation, tiny(steps=1), places())
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_tokens_of_another_vocabulary_are_not_scored() -> None:
    with pytest.raises(MobatlasError, match="test trajectories: token 99 is no place"):
        score_predictor(untrained(places()), walks([HOME, 99]))


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        MobatlasError, match=r"--profile quik does not exist; did you mean 'quick'\?"
    ):
        next_poi_config("quik")
    with pytest.raises(MobatlasError, match="'dropout' is wrong"):
        next_poi_config("quick", {"dropout": 1.0})
    with pytest.raises(MobatlasError, match="unknown key 'width'"):
        next_poi_config("full", {"width": 3})
    with pytest.raises(MobatlasError, match="--seed -1"):
        train_predictor(GOOD, GOOD, tiny(steps=1), places(), -1)


def test_one_layer_trains_without_a_warning() -> None:
    """Between its layers there is nothing to drop."""
    assert train_predictor(GOOD, GOOD, tiny(layers=1, steps=1), places()).steps == 1
