"""The privacy audit of samples or of a model: what do they disclose about training people?

Every check compares training people with people that the model never saw: matches with those
are chance. A check is judged by its 95 % interval. It is amber or red if the lower end is
above the limit, and green if the upper end is at most the red limit. Otherwise it is not decided.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.samples import read_samples
from mobatlas.data.types import ANCHORS as ANCHOR_NAMES
from mobatlas.data.types import OTHER, Flags, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import Interval, labelled_groups
from mobatlas.evaluation.privacy.measures import (
    FEWEST,
    GRAM,
    HELD_OUT,
    REFERENCE,
    TRAIN,
    Attack,
    Cohort,
    Excess,
    SampleDistances,
    anchor_scores,
    attacks,
    better_guesses,
    closer,
    draw_equal_groups,
    guessed_groups,
    infer,
    log_likelihood,
    measure_distances,
    shared,
    shared_nearby,
    singled_out,
    trajectory_scores,
)
from mobatlas.generators.store import load_model
from mobatlas.progress import SILENT, Tracker

GREEN = "green"
AMBER = "amber"
RED = "red"
UNDECIDED = "not decided"
UNTESTED = "not tested"
MEMORISATION = "memorisation"
MEMBERSHIP = "membership"
ANCHORS = "anchors"
GROUPS = "groups"
QUESTION = "Are these samples safe to share?"
MODEL_QUESTION = "Is this model safe to share?"
FINDINGS = {
    MEMORISATION: "repeat trajectories of training people",
    MEMBERSHIP: "reveal who is in the dataset",
    ANCHORS: "show homes or workplaces of training people",
    GROUPS: "reveal the groups of training people",
}
ADVICE = {
    MEMORISATION: "generate with --reject-copies, train on more people, or train for fewer steps",
    MEMBERSHIP: "train on more people, or train for fewer steps",
    ANCHORS: "generate with synthetic anchors (the default), or with --anchors observed and a "
    "larger --coarsen",
    GROUPS: "share samples of fewer groups, or merge small groups",
}
ENOUGH = 200  # held-out people: one half chooses an attack, 1 % of the other half is suspected
DECIMALS = 4  # of degrees, about 10 m: homes with the same rounded coordinates are equal
UNEVEN = 0.05  # more visits of held-out people outside the vocabulary
NOWHERE = 999.0  # degrees, in place of an unknown anchor
STEPS = 5  # of an audit, for a tracker
QUICK = 20_000  # trajectories of a dataset, and samples, that are audited in seconds
MOST_SCORED = 4_000  # trajectories of either side whose likelihood a model computes

# Limits of (amber, red).
REPEATS = (0.01, 0.05)  # share of samples that repeat a training person; chance gives 0
AUC = (0.52, 0.60)  # chance gives 0.5
GUESSES = (0.03, 0.10)  # more correct guesses of the group of training people; chance gives 0
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
    "model_auc": CheckSpec("Likelihood AUC", MEMBERSHIP, *AUC),
    "model_tpr": CheckSpec("Likelihood TPR", MEMBERSHIP, *TPR),
    "membership_auc": CheckSpec("Membership AUC", MEMBERSHIP, *AUC),
    "membership_tpr": CheckSpec("Membership TPR", MEMBERSHIP, *TPR),
    "pairs_of_one": CheckSpec("Home and work, unique", ANCHORS, *REPEATS),
    "near_homes": CheckSpec("Homes within 30 m", ANCHORS, *REPEATS),
    "near_works": CheckSpec("Workplaces within 30 m", ANCHORS, *REPEATS),
    "anchors_auc": CheckSpec("Anchors AUC", ANCHORS, *AUC),
    "anchors_tpr": CheckSpec("Anchors TPR", ANCHORS, *TPR),
    "group_by_trajectory": CheckSpec("Group by trajectory", GROUPS, *GUESSES),
    "group_by_home": CheckSpec("Group by home", GROUPS, *GUESSES),
}


MODEL = "model"  # its checks are of a model; all others are of samples


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
            f"there are too few people: the value may be as high as {self.measured.high:.3f}, "
            f"above the red limit of {self.spec.red:.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return (
            asdict(self) | asdict(self.spec) | {"verdict": self.verdict, "reason": self.explanation}
        )


@dataclass(frozen=True)
class Audit:
    """What a file of samples or a model discloses about the people of a dataset; see `audit`."""

    dataset: str
    samples: str  # or the MODEL folder
    trajectories: int  # 0 for a model
    people: dict[str, int]  # split -> people: train members, test held-out, val reference
    checks: tuple[Check, ...]
    attacks: dict[str, tuple[Attack, ...]]  # by trajectories and by anchors, or by likelihood
    chosen: dict[str, tuple[str, ...]]  # the best attack on either half of the people
    compared: dict[str, int]  # samples, people and trajectories that were compared
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

    @property
    def answer(self) -> str:
        """The verdict in plain words."""
        question = QUESTION if self.trajectories else MODEL_QUESTION
        if self.verdict == GREEN:
            passed = "no attack of this audit exceeded its limits"
            judged = [check.verdict == GREEN for check in self.checks]
            if all(judged):
                return f"{question} Yes: {passed}."
            return (
                f"{question} Yes, with a reservation: {passed}, but {judged.count(False)} of "
                f"{len(judged)} checks could not be decided."
            )
        failed = [check for check in self.checks if check.verdict in (AMBER, RED)]
        if not failed:
            subjects = [name for name, verdict in self.subjects.items() if verdict == UNDECIDED]
            reasons = [c.explanation for c in self.checks if c.spec.subject == subjects[0]]
            why = next(filter(None, reasons), "its checks were not possible")
            return f"{question} Not yet: {subjects[0]} could not be judged, because {why}."
        found = dict.fromkeys(FINDINGS[check.spec.subject] for check in failed)
        worst = next((check for check in failed if check.verdict == RED), failed[0])
        assert worst.measured is not None  # it has failed
        return (
            f"{question} Not yet: {'they' if self.trajectories else 'it may'} {', '.join(found)}, "
            f"because '{worst.spec.title}' is {worst.measured.estimate:.3f}; its limit is "
            f"{worst.spec.amber:g}."
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        verdicts = {
            "answer": self.answer,
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
    """Audit what a file of samples, or a model, discloses about training people.

    Parameters
    ----------
    samples
        A file that `generate` wrote, any table with the same columns, or a MODEL folder.
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
    rng = np.random.default_rng(seed)
    if Path(samples).is_dir():
        return _audit_model(Path(samples), opened, seed, tracker)
    file = read_samples(samples, opened.vocabulary, labelled_groups(opened))
    cohort = Cohort.of(opened, file.trajectories)
    drawn = cohort.draw_samples(rng)
    people = cohort.draw_people(rng)
    tracker.step(0, "distances")
    groups = draw_equal_groups(cohort.side, people, rng)
    distances = measure_distances(cohort, drawn, people, groups)
    tracker.step(1, "overlaps")
    closest = _check("closest", closer(distances.groups, groups))
    memorisation = (*_overlaps(cohort, rng), closest)
    tracker.step(2, "membership")
    membership = _membership(cohort, distances, people, rng)
    tracker.step(3, "anchors")
    anchors = _anchors(cohort, drawn.anchors, people, rng)
    tracker.step(4, "groups")
    guesses = _guesses(cohort, opened, file.groups)
    tracker.step(STEPS)
    return Audit(
        dataset=str(dataset),
        samples=str(file.path),
        trajectories=len(file.trajectories),
        people=cohort.people,
        checks=(*memorisation, *membership.checks, *anchors.checks, *guesses),
        attacks={"trajectories": membership.attacks, "anchors": anchors.attacks},
        chosen={"trajectories": membership.chosen, "anchors": anchors.chosen},
        compared=distances.sizes,
        warnings=(*file.warnings, *_warnings(cohort)),
        seed=seed,
    )


def quick_answer(samples: Path | str, dataset: Path, n: int) -> str:
    """The verdict on n samples in plain words, or why it was not computed."""
    by_hand = f"run mobatlas audit {samples} --dataset DATASET"
    try:
        if not dataset.exists():
            return f"{QUESTION} Not audited: there is no dataset at {dataset}; {by_hand}."
        if max(n, len(TrajectoryDataset.open(dataset))) > QUICK:
            return f"{QUESTION} Not audited: that may take minutes; {by_hand}."
        return audit(samples, dataset).answer
    except MobatlasError as error:
        return f"{QUESTION} Not audited: {error}."


def _audit_model(path: Path, dataset: TrajectoryDataset, seed: int, tracker: Tracker) -> Audit:
    """Membership inference by the likelihood of people's trajectories under a model."""
    rng = np.random.default_rng(seed)
    model = load_model(path, dataset.path)
    if not hasattr(model.generator, "log_likelihood"):
        raise MobatlasError(
            f"{path}: the generator {model.name} computes no likelihood of trajectories; audit its "
            "samples instead"
        )
    placeholder = Trajectories.of(dataset, np.zeros(1, np.int64))  # there are no samples
    cohort = Cohort.of(dataset, placeholder, model.generator.max_length)
    side = cohort.side[cohort.person]  # (real,)
    chosen = np.concatenate(
        [rng.permutation(np.flatnonzero(side == k))[:MOST_SCORED] for k in (TRAIN, HELD_OUT)]
    )
    tracker.step(1, "likelihood")
    real = cohort.real.take(chosen)
    reference = (cohort.owner >= 0) & (cohort.side[cohort.owner] == REFERENCE)
    usual = log_likelihood(cohort.grams, reference, cohort.vocabulary_size)  # (tokens,)
    ours = model.generator.log_likelihood(real)  # (chosen,)
    others = np.bincount(cohort.everything.owner, usual)[len(cohort.samples) :][chosen]
    attacked = np.unique(cohort.person[chosen])
    scores = {
        name: cohort.person_means(nats / np.diff(real.offsets), cohort.person[chosen])[attacked]
        for name, nats in (("likelihood", ours), ("likelihood, against reference", ours - others))
    }
    outcome = _inference(MODEL, scores, cohort.side[attacked], rng)
    stored = _stored_anchors(path)
    nearby = _nearby(stored, cohort.anchors, cohort.side, rng) if len(stored) else ()
    tracker.step(STEPS)
    return Audit(
        dataset=str(dataset.path),
        samples=str(path),
        trajectories=0,
        people=cohort.people,
        checks=(*outcome.checks, *nearby),
        attacks={"likelihood": outcome.attacks},
        chosen={"likelihood": outcome.chosen},
        compared={"samples": len(stored), "people": len(attacked)},
        warnings=(),
        seed=seed,
    )


def _stored_anchors(folder: Path) -> Floats:
    """The homes and workplaces (rows, 4) in the tables of a model folder."""
    tables = (pq.read_table(path) for path in sorted(folder.rglob("*.parquet")))
    known = [
        each.select(ANCHOR_NAMES) for each in tables if {*ANCHOR_NAMES} <= {*each.column_names}
    ]
    return np.concatenate([np.zeros((0, 4)), *(each.to_pandas().to_numpy() for each in known)])


@dataclass(frozen=True)
class _Outcome:
    """Checks of one subject, and the attacks behind them."""

    checks: tuple[Check, ...]
    attacks: tuple[Attack, ...] = ()
    chosen: tuple[str, ...] = ()


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
    pair = _equal_anchors(samples, cohort.anchors, side)
    attacked = people & (side != REFERENCE)
    outcome = _inference(
        ANCHORS, anchor_scores(cohort.anchors[attacked], drawn), side[attacked], rng
    )
    nearby = _nearby(samples, cohort.anchors, side, rng)
    return replace(outcome, checks=(pair, *nearby, *outcome.checks))


def _nearby(
    samples: Floats, anchors: Floats, side: Ints, rng: np.random.Generator
) -> Iterator[Check]:
    """Homes and workplaces of samples that are near those of training and of held-out people."""
    groups = draw_equal_groups(side, side != REFERENCE, rng)
    for name, place in (("near_homes", slice(0, 2)), ("near_works", slice(2, 4))):
        yield _check(name, shared_nearby(samples[:, place], anchors[:, place], groups))


def _guesses(cohort: Cohort, dataset: TrajectoryDataset, groups: Ints | None) -> Iterator[Check]:
    """Attacks that infer a person's group from the samples of each group."""
    if groups is None or dataset.groups is None or len(np.unique(groups)) < 2:
        return
    guessed = guessed_groups(cohort, groups, len(dataset.groups))
    own = dataset.person_groups()[cohort.rows]  # (people,)
    asked = (own >= 0) & (cohort.side != REFERENCE)
    for name, guess in guessed.items():
        correct = (guess == own)[asked].astype(np.float64)
        yield _check(name, better_guesses(correct, cohort.side[asked]))


def _equal_anchors(samples: Floats, anchors: Floats, side: Ints) -> Check:
    """Samples with the home and the workplace of exactly one person."""
    person = np.flatnonzero(side != REFERENCE)
    rounded = np.round(np.concatenate((samples, anchors[person])), DECIMALS)
    pairs = np.unique(np.nan_to_num(rounded, nan=NOWHERE), axis=0, return_inverse=True)[1]
    ours, real = np.split(pairs.ravel(), [len(samples)])
    return _check("pairs_of_one", singled_out(ours, real, person, side))


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
