"""The privacy audit of a file of samples: does it repeat training people, betray who they were, or tell where they live.

Everything stands beside people whom the model never saw, because what these share with samples is chance. A check is judged by
both ends of its 95 % interval: amber and red are said of what is sure, and so is green. It is green only where its upper end is
not above the red line; where the interval has room for both, nothing was decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.samples import read_samples
from mobatlas.data.vocabulary import OTHER
from mobatlas.evaluation.comparison import Interval
from mobatlas.evaluation.privacy.cohort import (
    FEWEST,
    GRAM,
    HELD_OUT,
    REFERENCE,
    SPLITS,
    TRAIN,
    Crowd,
    Deal,
    Nearness,
    deal,
    nearness,
)
from mobatlas.evaluation.privacy.membership import (
    Attack,
    anchor_scores,
    attacks,
    infer,
    trajectory_scores,
)
from mobatlas.evaluation.privacy.memorisation import (
    RARE,
    Excess,
    closer,
    rare_places,
    shared,
    singled_out,
)
from mobatlas.evaluation.privacy.ngrams import Flags
from mobatlas.progress import SILENT, Tracker

GREEN, AMBER, RED, UNDECIDED, UNTESTED = "green", "amber", "red", "not decided", "not tested"
MEMORISATION, MEMBERSHIP, ANCHORS = "memorisation", "membership", "anchors"
ADVICE = {
    MEMORISATION: "train on more people, or less long, or with fewer places (prepare --set vocabulary_size=N)",
    MEMBERSHIP: "train on more people, or less long, or share fewer samples",
    ANCHORS: "generate with a wider --coarsen, or with --anchors of people who are not in the dataset",
}
ENOUGH = 200  # held-out people: half of them choose an attack, and one in a hundred of the others is suspected
DECIMALS = 4  # of degrees, about 10 m: homes that agree so far are the same
UNEVEN = 0.05  # more visits outside the vocabulary, of held-out people
NOWHERE = 999.0  # degrees, in place of an unknown anchor
STEPS = 4  # of an audit, for a tracker


@dataclass(frozen=True)
class Kind:
    """What is measured; a lower end above `amber` is amber, above `red` red, an upper end up to `red` green."""

    title: str
    about: str
    amber: float
    red: float


REPEATS = (0.01, 0.05)  # share of samples that repeat a training person; chance gives 0
PLACES = (
    0.10,
    0.25,
)  # share of rare places; a good model knows them a little better than chance does
AUC = (0.52, 0.60)  # chance gives 0.5
TPR = (
    0.02,
    0.05,
)  # share of training people found while 1 % of others are suspected; chance gives 0.01
KINDS = {
    "trajectories": Kind("Trajectories", MEMORISATION, *REPEATS),
    "trajectories_of_one": Kind("Trajectories of one", MEMORISATION, *REPEATS),
    "grams": Kind(f"{GRAM}-grams", MEMORISATION, *REPEATS),
    "grams_of_one": Kind(f"{GRAM}-grams of one", MEMORISATION, *REPEATS),
    "closest": Kind("Closest record", MEMORISATION, *REPEATS),
    "places": Kind("Rare places", MEMORISATION, *PLACES),
    "membership_auc": Kind("Member AUC", MEMBERSHIP, *AUC),
    "membership_tpr": Kind("Member TPR", MEMBERSHIP, *TPR),
    "pairs": Kind("Home and work", ANCHORS, *REPEATS),
    "pairs_of_one": Kind("Home and work of one", ANCHORS, *REPEATS),
    "anchors_auc": Kind("Member AUC, anchors", ANCHORS, *AUC),
    "anchors_tpr": Kind("Member TPR, anchors", ANCHORS, *TPR),
}


@dataclass(frozen=True)
class Check:
    """One measurement and how it is judged."""

    name: str
    train: float | None = (
        None  # what equally many training and held-out people give, where two sides are compared
    )
    held_out: float | None = None
    measured: Interval | None = None  # None where it was not tested
    reason: str | None = None  # why it was not

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return UNTESTED
        low, high = self.measured.low, self.measured.high
        if low > self.kind.amber:
            return RED if low > self.kind.red else AMBER
        return GREEN if high <= self.kind.red else UNDECIDED

    @property
    def why(self) -> str | None:
        """Why it is neither green nor amber nor red."""
        if self.measured is None or self.verdict != UNDECIDED:
            return self.reason
        return f"too few people: up to {self.measured.high:.3f} is possible, and red begins at {self.kind.red:.2f}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | asdict(self.kind) | {"verdict": self.verdict, "reason": self.why}


@dataclass(frozen=True)
class Audit:
    """What a file of samples gives away of the people of a dataset."""

    dataset: str
    samples: str
    trajectories: int
    people: dict[
        str, int
    ]  # by split: train are members, test held-out, val those whom an attacker knows
    checks: tuple[Check, ...]
    attacks: dict[str, tuple[Attack, ...]]  # by trajectories and by anchors, each by itself
    chosen: dict[str, tuple[str, ...]]  # the best of them on either half of the people
    closest: dict[
        str, dict[str, float]
    ]  # side -> distances of samples to the closest record of equally many people
    equal_anchors: dict[
        str, float
    ]  # shares of samples with home and work of a training person, of only one person
    compared: dict[str, int]  # what distances were measured of
    warnings: tuple[str, ...]
    seed: int

    @property
    def subjects(self) -> dict[str, str]:
        """The verdict on each subject."""
        found: dict[str, list[str]] = {}
        for check in self.checks:
            found.setdefault(check.kind.about, []).append(check.verdict)
        return {about: _together(verdicts) for about, verdicts in found.items()}

    @property
    def verdict(self) -> str:
        """The worst of all subjects."""
        return max(self.subjects.values(), key=(GREEN, UNDECIDED, AMBER, RED).index)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do about what is not green."""
        wrong = dict.fromkeys(
            check.kind.about for check in self.checks if check.verdict in (AMBER, RED)
        )
        return tuple(f"{about}: {ADVICE[about]}" for about in wrong)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {
            "verdict": self.verdict,
            "subjects": self.subjects,
            "advice": list(self.advice),
        } | asdict(self)
        return found | {"checks": [check.as_dict() for check in self.checks]}


def _together(verdicts: Sequence[str]) -> str:
    """Of the checks of a subject: the worst that is sure; green needs at least half of them to be green."""
    for sure in (RED, AMBER):
        if sure in verdicts:
            return sure
    return GREEN if 2 * verdicts.count(GREEN) >= len(verdicts) else UNDECIDED


def audit(
    samples: Path | str, dataset: Path | str, *, seed: int = 0, tracker: Tracker = SILENT
) -> Audit:
    """Audit a file of samples against training people, beside test people; validation people are what an attacker knows."""
    opened = TrajectoryDataset.open(dataset)
    file = read_samples(samples, opened.vocabulary)
    crowd, rng = Crowd.of(opened, file.trajectories), np.random.default_rng(seed)
    some, few = crowd.some_samples(rng), crowd.some_people(rng)
    tracker.step(0, "distances")
    dealt = deal(crowd.side, few, rng)
    near = nearness(crowd, some, few, dealt)
    tracker.step(1, "overlaps")
    memorised = (
        *_overlaps(crowd, rng),
        _check("closest", closer(near.groups, dealt)),
        _places(crowd, rng),
    )
    tracker.step(2, "membership")
    chosen = few & (crowd.side != REFERENCE)
    scores = {name: score[chosen] for name, score in trajectory_scores(crowd, near).items()}
    told = _inferred(MEMBERSHIP, scores, crowd.side[chosen], rng)
    tracker.step(3, "anchors")
    homes = _anchored(crowd, some.anchors, few, rng)
    tracker.step(STEPS)
    people = {split: int(np.count_nonzero(crowd.side == side)) for split, side in SPLITS.items()}
    return Audit(
        dataset=str(dataset),
        samples=str(file.path),
        trajectories=len(file.trajectories),
        people=people,
        checks=(*memorised, *told.checks, *homes.checks),
        attacks={"trajectories": told.attacks, "anchors": homes.attacks},
        chosen={"trajectories": told.chosen, "anchors": homes.chosen},
        closest=_distances(near, dealt),
        equal_anchors=homes.shares,
        compared={
            "samples": len(some),
            "people": len(np.unique(near.person)),
            "trajectories": len(near.person),
        },
        warnings=(*file.warnings, *_warnings(crowd)),
        seed=seed,
    )


def _warnings(crowd: Crowd) -> Iterator[str]:
    if not (crowd.side == REFERENCE).any():
        yield "no people are in split 'val', so attacks that know other people were not tried"
    ours, theirs = (
        float((crowd.of_side(side).tokens == OTHER).mean()) for side in (TRAIN, HELD_OUT)
    )
    if theirs - ours > UNEVEN:
        yield (
            f"{theirs:.0%} of the visits of held-out people are outside the vocabulary, of training people's {ours:.0%}: "
            "it holds places that hardly anybody else visits, and samples that know these count as repeats"
        )


@dataclass(frozen=True)
class _Found:
    """Checks, and what is behind them."""

    checks: tuple[Check, ...]
    attacks: tuple[Attack, ...] = ()
    chosen: tuple[str, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)


def _check(name: str, found: Excess | Interval | str) -> Check:
    """Of what was found, or of why nothing was."""
    if isinstance(found, str):
        return Check(name, reason=found)
    if isinstance(found, Interval):
        return Check(name, measured=found)
    return Check(name, found.train, found.held_out, found.beyond)


def _overlaps(crowd: Crowd, rng: np.random.Generator) -> Iterator[Check]:
    """Sequences and 5-grams that samples have in common with training people, and with held-out ones."""
    dealt, made = deal(crowd.side, np.ones(len(crowd.side), dtype=bool), rng), len(crowd.made)
    grams, person = crowd.grams[-1], crowd.owner
    ours, theirs = grams.whole & (person < 0), grams.whole & (person >= 0)
    for name, sides, who in (
        ("trajectories", (crowd.sequences[:made], crowd.sequences[made:]), crowd.person),
        ("grams", (grams.numbers[ours], grams.numbers[theirs]), person[theirs]),
    ):
        missing = (
            "" if all(map(len, sides)) else f"no sample, or no real trajectory, has {GRAM} visits"
        )
        yield _check(name, missing or shared(*sides, who, dealt))
        yield _check(f"{name}_of_one", missing or singled_out(*sides, who, crowd.side))


def _places(crowd: Crowd, rng: np.random.Generator) -> Check:
    held_out = crowd.of_side(HELD_OUT)
    n = min(len(crowd.made), len(held_out))
    ours, theirs = (each.take(rng.permutation(len(each))[:n]) for each in (crowd.made, held_out))
    person = crowd.person[crowd.side[crowd.person] == TRAIN]
    found = rare_places(ours, crowd.of_side(TRAIN), person, theirs)
    return _check(
        "places", found or f"hardly any place is visited by {RARE} training people or fewer"
    )


def _distances(near: Nearness, dealt: Deal) -> dict[str, dict[str, float]]:
    sides = {
        "train": near.groups[:, : dealt.training],
        "held_out": near.groups[:, dealt.training :],
    }
    points = {"p05": 0.05, "median": 0.5}
    return {
        side: {"mean": float(found.mean())}
        | {name: float(np.quantile(found, at)) for name, at in points.items()}
        for side, found in sides.items()
    }


def _inferred(
    about: str, scores: Mapping[str, Floats], side: Ints, rng: np.random.Generator
) -> _Found:
    """The best of some attacks on training and held-out people, (people,) each."""
    member = (side == TRAIN).astype(np.int64)
    found, others = infer(scores, member, rng), int(np.count_nonzero(side == HELD_OUT))
    few = f"{others} held-out people are too few to suspect 1 % of them; {ENOUGH} are enough"
    checks = (
        _check(f"{about}_auc", found.auc),
        _check(f"{about}_tpr", few if others < ENOUGH else found.tpr),
    )
    return _Found(checks, attacks(scores, member), found.chosen)


def _anchored(crowd: Crowd, some: Floats, few: Flags, rng: np.random.Generator) -> _Found:
    """Homes and workplaces of samples that a training person has, and attacks by them."""
    side = np.where(_known(crowd.anchors), crowd.side, REFERENCE)  # who has none is on no side here
    made, some = (rows[_known(rows)] for rows in (crowd.made.anchors, some))
    people = min(int(np.count_nonzero(side[few] == which)) for which in (TRAIN, HELD_OUT))
    if not len(some) or people < FEWEST:
        missing = (
            "samples have no home and work"
            if people >= FEWEST
            else "too few people have a home or work"
        )
        return _Found(
            tuple(_check(name, missing) for name, kind in KINDS.items() if kind.about == ANCHORS)
        )
    pairs, shares = _equal_anchors(made, crowd.anchors, side, rng)
    chosen = few & (side != REFERENCE)
    told = _inferred(ANCHORS, anchor_scores(crowd.anchors[chosen], some), side[chosen], rng)
    return replace(told, checks=(*pairs, *told.checks), shares=shares)


def _equal_anchors(
    made: Floats, anchors: Floats, side: Ints, rng: np.random.Generator
) -> tuple[tuple[Check, Check], dict[str, float]]:
    who = np.flatnonzero(side != REFERENCE)
    whole = np.nan_to_num(np.round(np.concatenate((made, anchors[who])), DECIMALS), nan=NOWHERE)
    ours, real = np.split(np.unique(whole, axis=0, return_inverse=True)[1].ravel(), [len(made)])
    all_of, one = (
        shared(ours, real, who, deal(side, side != REFERENCE, rng)),
        singled_out(ours, real, who, side),
    )
    trained = real[side[who] == TRAIN]
    shares = {
        "of_a_training_person": float(np.isin(ours, trained).mean()),
        "of_only_one_person": one.train * len(trained) / (len(real) - len(trained)),
    }
    return (_check("pairs", all_of), _check("pairs_of_one", one)), shares


def _known(anchors: Floats) -> Flags:
    """Rows with a home or a workplace."""
    return np.asarray(~np.isnan(anchors).all(1))
