"""The privacy audit of a file of samples: memorisation, membership inference, homes and workplaces.

Every check compares training people with people that the model never saw: matches with those
are chance. A check is judged by its 95 % interval. It is amber or red if the lower end is
above the limit, and green if the upper end is at most the red limit. Otherwise it is not decided.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.samples import read_samples
from mobatlas.data.types import OTHER, Flags, Floats, Ints
from mobatlas.evaluation.comparison import Interval
from mobatlas.evaluation.privacy.measures import (
    FEWEST,
    GRAM,
    HELD_OUT,
    RARE,
    REFERENCE,
    SPLITS,
    TRAIN,
    Attack,
    Cohort,
    EqualGroups,
    Excess,
    SampleDistances,
    anchor_scores,
    attacks,
    closer,
    draw_equal_groups,
    infer,
    measure_distances,
    rare_places,
    shared,
    singled_out,
    trajectory_scores,
)
from mobatlas.progress import SILENT, Tracker

GREEN = "green"
AMBER = "amber"
RED = "red"
UNDECIDED = "not decided"
UNTESTED = "not tested"
MEMORISATION = "memorisation"
MEMBERSHIP = "membership"
ANCHORS = "anchors"
ADVICE = {
    MEMORISATION: "train on more people, train for fewer steps, or keep fewer places "
    "(mobatlas prepare --set vocabulary_size=N)",
    MEMBERSHIP: "train on more people, train for fewer steps, or share fewer samples",
    ANCHORS: "generate with a larger --coarsen, or with --anchors of people outside the dataset",
}
ENOUGH = 200  # held-out people: one half chooses an attack, 1 % of the other half is suspected
DECIMALS = 4  # of degrees, about 10 m: homes with the same rounded coordinates are equal
UNEVEN = 0.05  # more visits of held-out people outside the vocabulary
NOWHERE = 999.0  # degrees, in place of an unknown anchor
STEPS = 4  # of an audit, for a tracker

# Limits of (amber, red).
REPEATS = (0.01, 0.05)  # share of samples that repeat a training person; chance gives 0
PLACES = (0.10, 0.25)  # share of rare places; a good model knows a few more than chance
AUC = (0.52, 0.60)  # chance gives 0.5
TPR = (0.02, 0.05)  # training people identified while 1 % of others are suspected; chance: 0.01


@dataclass(frozen=True)
class CheckSpec:
    """What a check measures, and its limits."""

    title: str
    subject: str
    amber: float
    red: float


CHECKS = {
    "trajectories": CheckSpec("Trajectories", MEMORISATION, *REPEATS),
    "trajectories_of_one": CheckSpec("Trajectories, unique", MEMORISATION, *REPEATS),
    "grams": CheckSpec(f"{GRAM}-grams", MEMORISATION, *REPEATS),
    "grams_of_one": CheckSpec(f"{GRAM}-grams, unique", MEMORISATION, *REPEATS),
    "closest": CheckSpec("Closest record", MEMORISATION, *REPEATS),
    "places": CheckSpec("Rare places", MEMORISATION, *PLACES),
    "membership_auc": CheckSpec("Membership AUC", MEMBERSHIP, *AUC),
    "membership_tpr": CheckSpec("Membership TPR", MEMBERSHIP, *TPR),
    "pairs": CheckSpec("Home and work", ANCHORS, *REPEATS),
    "pairs_of_one": CheckSpec("Home and work, unique", ANCHORS, *REPEATS),
    "anchors_auc": CheckSpec("Anchors AUC", ANCHORS, *AUC),
    "anchors_tpr": CheckSpec("Anchors TPR", ANCHORS, *TPR),
}


@dataclass(frozen=True)
class Check:
    """One measurement and its verdict."""

    name: str
    train: float | None = None  # share for equally many training and held-out people
    held_out: float | None = None
    measured: Interval | None = None  # None: not tested
    reason: str | None = None  # why it was not tested

    @property
    def spec(self) -> CheckSpec:
        return CHECKS[self.name]

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return UNTESTED
        if self.measured.low > self.spec.amber:
            return RED if self.measured.low > self.spec.red else AMBER
        return GREEN if self.measured.high <= self.spec.red else UNDECIDED

    @property
    def explanation(self) -> str | None:
        """Why the verdict is neither green nor amber nor red."""
        if self.measured is None or self.verdict != UNDECIDED:
            return self.reason
        return (
            f"too few people: the value may be as high as {self.measured.high:.3f}, "
            f"above the red limit of {self.spec.red:.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return (
            asdict(self) | asdict(self.spec) | {"verdict": self.verdict, "reason": self.explanation}
        )


@dataclass(frozen=True)
class Audit:
    """What a file of samples discloses about the people of a dataset; see `audit`."""

    dataset: str
    samples: str
    trajectories: int
    people: dict[str, int]  # split -> people: train members, test held-out, val reference
    checks: tuple[Check, ...]
    attacks: dict[str, tuple[Attack, ...]]  # by trajectories and by anchors
    chosen: dict[str, tuple[str, ...]]  # the best attack on either half of the people
    closest: dict[str, dict[str, float]]  # side -> distances from samples to the closest record
    equal_anchors: dict[str, float]  # shares of samples with a real person's home and work
    compared: dict[str, int]  # samples, people and trajectories that distances were measured for
    warnings: tuple[str, ...]
    seed: int

    @property
    def subjects(self) -> dict[str, str]:
        """The verdict on each subject."""
        return {
            subject: _combined([c.verdict for c in self.checks if c.spec.subject == subject])
            for subject in dict.fromkeys(check.spec.subject for check in self.checks)
        }

    @property
    def verdict(self) -> str:
        """The worst verdict of all subjects."""
        return max(self.subjects.values(), key=(GREEN, UNDECIDED, AMBER, RED).index)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do about each subject that is amber or red."""
        failed = dict.fromkeys(
            check.spec.subject for check in self.checks if check.verdict in (AMBER, RED)
        )
        return tuple(f"{subject}: {ADVICE[subject]}" for subject in failed)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        verdicts = {
            "verdict": self.verdict,
            "subjects": self.subjects,
            "advice": list(self.advice),
        }
        return verdicts | asdict(self) | {"checks": [check.as_dict() for check in self.checks]}


def _combined(verdicts: Sequence[str]) -> str:
    """The worst certain verdict; green needs at least half of the checks to be green."""
    for certain in (RED, AMBER):
        if certain in verdicts:
            return certain
    return GREEN if 2 * verdicts.count(GREEN) >= len(verdicts) else UNDECIDED


def audit(
    samples: Path | str, dataset: Path | str, *, seed: int = 0, tracker: Tracker = SILENT
) -> Audit:
    """Audit what a file of samples discloses about training people.

    Parameters
    ----------
    samples
        A file that `generate` wrote, or any table with the same columns.
    dataset
        The training data. It compares with test people; attackers know validation people.
    seed
        Decides which samples and people are compared.
    tracker
        Shows progress.

    Returns
    -------
    Audit
        Checks with verdicts.

    Examples
    --------
    >>> audit("samples.parquet", "dataset").verdict  # doctest: +SKIP
    'green'
    """
    opened = TrajectoryDataset.open(dataset)
    file = read_samples(samples, opened.vocabulary)
    cohort = Cohort.of(opened, file.trajectories)
    rng = np.random.default_rng(seed)
    drawn = cohort.draw_samples(rng)
    people = cohort.draw_people(rng)
    tracker.step(0, "distances")
    groups = draw_equal_groups(cohort.side, people, rng)
    distances = measure_distances(cohort, drawn, people, groups)
    tracker.step(1, "overlaps")
    closest = _check("closest", closer(distances.groups, groups))
    memorisation = (*_overlaps(cohort, rng), closest, _rare_places(cohort, rng))
    tracker.step(2, "membership")
    membership = _membership(cohort, distances, people, rng)
    tracker.step(3, "anchors")
    anchors = _anchors(cohort, drawn.anchors, people, rng)
    tracker.step(STEPS)
    return Audit(
        dataset=str(dataset),
        samples=str(file.path),
        trajectories=len(file.trajectories),
        people={split: int((cohort.side == side).sum()) for split, side in SPLITS.items()},
        checks=(*memorisation, *membership.checks, *anchors.checks),
        attacks={"trajectories": membership.attacks, "anchors": anchors.attacks},
        chosen={"trajectories": membership.chosen, "anchors": anchors.chosen},
        closest=_closest_records(distances, groups),
        equal_anchors=anchors.shares,
        compared=distances.sizes,
        warnings=(*file.warnings, *_warnings(cohort)),
        seed=seed,
    )


@dataclass(frozen=True)
class _Outcome:
    """Checks of one subject, and the attacks and shares behind them."""

    checks: tuple[Check, ...]
    attacks: tuple[Attack, ...] = ()
    chosen: tuple[str, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)


def _check(name: str, result: Excess | Interval | str) -> Check:
    """A check with its measurement, or with the reason why there is none."""
    if isinstance(result, str):
        return Check(name, reason=result)
    if isinstance(result, Interval):
        return Check(name, measured=result)
    return Check(name, result.train, result.held_out, result.interval)


def _overlaps(cohort: Cohort, rng: np.random.Generator) -> Iterator[Check]:
    """Sequences and n-grams that samples share with training people and with held-out people."""
    groups = draw_equal_groups(cohort.side, np.ones(len(cohort.side), dtype=bool), rng)
    n = len(cohort.samples)
    grams = cohort.grams[-1]
    ours = grams.complete & (cohort.owner < 0)
    real = grams.complete & (cohort.owner >= 0)
    for name, sides, person in (
        ("trajectories", (cohort.sequences[:n], cohort.sequences[n:]), cohort.person),
        ("grams", (grams.numbers[ours], grams.numbers[real]), cohort.owner[real]),
    ):
        too_short = f"no sample, or no real trajectory, has {GRAM} visits"
        reason = "" if all(map(len, sides)) else too_short
        yield _check(name, reason or shared(*sides, person, groups))
        yield _check(f"{name}_of_one", reason or singled_out(*sides, person, cohort.side))


def _rare_places(cohort: Cohort, rng: np.random.Generator) -> Check:
    held_out = cohort.of_side(HELD_OUT)
    n = min(len(cohort.samples), len(held_out))
    ours, theirs = (
        each.take(rng.permutation(len(each))[:n]) for each in (cohort.samples, held_out)
    )
    person = cohort.person[cohort.side[cohort.person] == TRAIN]
    excess = rare_places(ours, cohort.of_side(TRAIN), person, theirs)
    return _check(
        "places", excess or f"hardly any place has {RARE} or fewer visitors among training people"
    )


def _closest_records(
    distances: SampleDistances, groups: EqualGroups
) -> dict[str, dict[str, float]]:
    sides = {
        "train": distances.groups[:, : groups.training],
        "held_out": distances.groups[:, groups.training :],
    }
    return {
        side: {
            "mean": float(values.mean()),
            "p05": float(np.quantile(values, 0.05)),
            "median": float(np.quantile(values, 0.5)),
        }
        for side, values in sides.items()
    }


def _membership(
    cohort: Cohort, distances: SampleDistances, people: Flags, rng: np.random.Generator
) -> _Outcome:
    attacked = people & (cohort.side != REFERENCE)
    scores = {name: score[attacked] for name, score in trajectory_scores(cohort, distances).items()}
    return _inference(MEMBERSHIP, scores, cohort.side[attacked], rng)


def _inference(
    subject: str, scores: Mapping[str, Floats], side: Ints, rng: np.random.Generator
) -> _Outcome:
    """The best of some attacks on training and held-out people; scores are (people,) each."""
    member = (side == TRAIN).astype(np.int64)
    best = infer(scores, member, rng)
    others = int(np.count_nonzero(side == HELD_OUT))
    too_few = f"{others} held-out people are too few for a rate of 1 %; {ENOUGH} are needed"
    checks = (
        _check(f"{subject}_auc", best.auc),
        _check(f"{subject}_tpr", too_few if others < ENOUGH else best.tpr),
    )
    return _Outcome(checks, attacks(scores, member), best.chosen)


def _anchors(cohort: Cohort, drawn: Floats, people: Flags, rng: np.random.Generator) -> _Outcome:
    """Homes and workplaces that samples share with training people, and attacks by them."""
    # People without any known anchor are excluded here.
    side = np.where(_known(cohort.anchors), cohort.side, REFERENCE)
    samples = cohort.samples.anchors[_known(cohort.samples.anchors)]
    drawn = drawn[_known(drawn)]
    fewest = min(int(np.count_nonzero(side[people] == which)) for which in (TRAIN, HELD_OUT))
    if not len(drawn) or fewest < FEWEST:
        reason = (
            "too few people have a home or a workplace"
            if fewest < FEWEST
            else "samples have no home and work"
        )
        names = [name for name, spec in CHECKS.items() if spec.subject == ANCHORS]
        return _Outcome(tuple(_check(name, reason) for name in names))
    pairs, shares = _equal_anchors(samples, cohort.anchors, side, rng)
    attacked = people & (side != REFERENCE)
    outcome = _inference(
        ANCHORS, anchor_scores(cohort.anchors[attacked], drawn), side[attacked], rng
    )
    return replace(outcome, checks=(*pairs, *outcome.checks), shares=shares)


def _equal_anchors(
    samples: Floats, anchors: Floats, side: Ints, rng: np.random.Generator
) -> tuple[tuple[Check, Check], dict[str, float]]:
    person = np.flatnonzero(side != REFERENCE)
    rounded = np.round(np.concatenate((samples, anchors[person])), DECIMALS)
    pairs = np.unique(np.nan_to_num(rounded, nan=NOWHERE), axis=0, return_inverse=True)[1]
    ours, real = np.split(pairs.ravel(), [len(samples)])
    groups = draw_equal_groups(side, side != REFERENCE, rng)
    unique = singled_out(ours, real, person, side)
    training = real[side[person] == TRAIN]
    shares = {
        "of_a_training_person": float(np.isin(ours, training).mean()),
        "of_only_one_person": unique.train * len(training) / (len(real) - len(training)),
    }
    repeated = _check("pairs", shared(ours, real, person, groups))
    return (repeated, _check("pairs_of_one", unique)), shares


def _known(anchors: Floats) -> Flags:
    """Whether each row has a home or a workplace."""
    return np.asarray(~np.isnan(anchors).all(1))


def _warnings(cohort: Cohort) -> Iterator[str]:
    if not (cohort.side == REFERENCE).any():
        yield "split 'val' has no people, so attacks that compare with other people were not tried"
    ours, theirs = (
        float((cohort.of_side(side).tokens == OTHER).mean()) for side in (TRAIN, HELD_OUT)
    )
    if theirs - ours > UNEVEN:
        yield (
            f"{theirs:.0%} of the visits of held-out people are outside the vocabulary, and "
            f"{ours:.0%} of those of training people; so visits to places that only training "
            "people know count as repeats"
        )
