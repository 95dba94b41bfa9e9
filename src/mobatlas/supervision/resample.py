"""Resample: the training-free strategy, samples of a baseline chosen by calibrated tilts; and how any samples are chosen so.

What is chosen is a function of (seed, number of the candidate), so neither how many are asked for nor the chunks in which they
are made change it, and no candidate is given away twice. No label is read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mobatlas.data.arrays import Floats
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Generator
from mobatlas.generators.rng import draw_rows, uniforms
from mobatlas.groups import Groups
from mobatlas.io.manifest import write_json
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.calibration import CANDIDATES, POOL, RIDGE, Calibration, fit_calibration
from mobatlas.supervision.evidence import Evidence, of_group
from mobatlas.supervision.fixed_anchor_calibration import given_weights
from mobatlas.supervision.moments import Ints, Moments, Phi
from mobatlas.training.checkpoints import write_whole

FILES = ("calibration.json", "calibration.safetensors")
BLOCK = 4_096  # candidates drawn at a time, at most
PATIENCE = 10  # times as many candidates as expected are drawn before giving up
PIECE, APART = (
    1_024,
    2**32,
)  # samples with candidates of their own, and how many of these no piece comes to
POPULATION, GIVEN, AGAIN = 21, 22, 23  # streams of random numbers


@dataclass(frozen=True)
class Accepted:
    """Samples of one group, and what they cost."""

    trajectories: Trajectories
    numbers: Ints  # (n,) of the candidates, ascending
    following: int  # the candidate to go on from
    drawn: int  # candidates that were looked at

    @property
    def rate(self) -> float:
        """The share of candidates that were accepted."""
        return len(self.numbers) / self.drawn


@runtime_checkable
class Sampler(Protocol):
    """Samples of groups, whatever stands behind them."""

    @property
    def groups(self) -> Groups | None:
        """None: a baseline, whose samples are of everybody whatever group is asked for."""
        ...

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        """n samples of a group with anchors of the population, from candidate `first` on."""
        ...

    def sample_given(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """Samples number `first` and on, one for each group and each row of anchors; `draws` of them, draw after draw."""
        ...


@dataclass(frozen=True)
class PlainSampler:
    """A generator as it is: every candidate is accepted."""

    model: Generator
    anchors: Floats  # (rows, 4) of the population
    lives: Floats | None = None  # see Moments

    @property
    def groups(self) -> Groups | None:
        return self.model.groups

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        """With anchors drawn from the population."""
        uniform = uniforms(_stream(seed, POPULATION, group), first, first + n)[:, 0]
        anchors = self.anchors[draw_rows(uniform, len(self.anchors), of_group(self.lives, group))]
        made = self.sample_given(np.full(n, group, dtype=np.int64), anchors, seed, first=first)
        return Accepted(made, first + np.arange(n), first + n, n)

    def sample_given(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """As the generator makes them."""
        told = None if self.model.groups is None else groups
        seeds = [seed, *(_stream(seed, AGAIN, draw) for draw in range(1, draws))]
        return Trajectories.joined(
            [self.model.sample(len(groups), told, anchors, own, first=first) for own in seeds]
        )


@dataclass(frozen=True)
class CalibratedSampler:
    """A generator whose candidates are chosen by a calibration: of a taught model, or of a baseline, which is `resample`."""

    model: Generator
    calibration: Calibration
    anchors: Floats  # (rows, 4) of the population: those of training people
    phi: Phi
    lives: Floats | None = None  # see Moments

    @classmethod
    def of(
        cls,
        model: Generator,
        calibration: Calibration,
        anchors: Floats,
        lives: Floats | None = None,
    ) -> CalibratedSampler:
        """Refuses a calibration of another kind of model, or in other words than the model's."""
        if calibration.told != (model.groups is not None):
            known = "knows groups" if model.groups is not None else "knows no groups"
            raise MobatlasError(
                f"calibration: was fitted on another model than this one, which {known}; fit it again"
            )
        if model.groups is not None and model.groups.names != calibration.groups.names:
            raise MobatlasError("calibration: its groups are not those of the model; fit it again")
        if not len(anchors):
            raise MobatlasError("calibration: there are no anchors to draw samples for")
        phi = Phi.of(calibration.features, model.vocabulary, calibration.mask)
        return cls(model, calibration, anchors, phi, lives)

    @property
    def groups(self) -> Groups:
        return self.calibration.groups

    def sample(
        self,
        n: int,
        group: int,
        seed: int = 0,
        *,
        first: int = 0,
        most: int | None = None,
        block: int = BLOCK,
    ) -> Accepted:
        """Form `population`: candidates from number `first` on, each accepted or not, until there are n.

        To go on, pass `following` as `first`. `most` candidates are drawn before it gives up; by default ten times as many as
        the calibration expects. `block` is how many are made at a time, and changes nothing else.
        """
        if n < 1 or not 0 <= group < len(self.groups):
            raise MobatlasError(
                f"ask for at least 1 sample of one of {len(self.groups)} groups, not {n} of {group}"
            )
        expected, tile = self.calibration.population[group].acceptance, self.model.tile
        most = int(PATIENCE * n / expected) + tile if most is None else most
        found: list[tuple[Trajectories, Ints]] = []
        count, place = 0, first
        while count < n:
            if place - first >= most:
                raise MobatlasError(
                    f"group '{self.groups.names[group]}': {count} of {place - first:,} candidates were accepted where "
                    f"{expected:.0%} were expected, and {n:,} are wanted; fit the calibration anew, on a larger pool"
                )
            stop = (
                -(-(place + min(block, int((n - count) / expected))) // tile) * tile
            )  # whole tiles cost as much as parts
            size = min(stop, first + most) - place
            found.append(self._accepted(place, size, group, seed, n - count))
            count, place = count + len(found[-1][1]), place + size
        numbers = np.concatenate([each for _, each in found])
        following = int(numbers[-1]) + 1
        return Accepted(
            Trajectories.joined([each for each, _ in found]), numbers, following, following - first
        )

    def sample_piece(
        self, number: int, n: int, group: int, seed: int = 0, *, block: int = BLOCK
    ) -> Accepted:
        """The first n of the PIECE samples of a piece: a function of (seed, number), whatever was accepted before it."""
        return self.sample(n, group, seed, first=number * APART, block=block)

    def _accepted(
        self, first: int, size: int, group: int, seed: int, most: int
    ) -> tuple[Trajectories, Ints]:
        """Which of the candidates from `first` on are accepted, `most` of them at most."""
        weighting, own = self.calibration.population[group], _stream(seed, POPULATION, group)
        uniform = uniforms(own, first, first + size)  # (size, 4)
        anchors = self.anchors[
            draw_rows(uniform[:, 0], len(self.anchors), of_group(self.lives, group))
        ]
        groups = np.full(size, group, dtype=np.int64) if self.calibration.told else None
        made = self.model.sample(size, groups, anchors, own, first=first)
        logits = (
            self.phi.counts(made) @ weighting.coefficients
            - weighting.offset
            - np.log(weighting.cap)
        )
        chosen = np.flatnonzero(uniform[:, 1] < np.exp(np.minimum(logits, 0)))[:most]  # w(x) / cap
        return made.take(chosen), first + chosen

    def sample_given(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """Form `given`: of K candidates for each row one, by the weights of its group; all alike where it is UNKNOWN.

        Several draws choose among the same candidates.
        """
        k, own = self.calibration.candidates, _stream(seed, GIVEN, 0)
        told = np.repeat(groups, k) if self.calibration.told else None
        made = self.model.sample(
            k * len(groups), told, np.repeat(anchors, k, axis=0), own, first=k * first
        )
        table = np.vstack(
            [
                *(each.coefficients for each in self.calibration.given),
                np.zeros(len(self.phi.features)),
            ]
        )
        ratio = np.array(
            [*(each.visits for each in self.calibration.given), 1.0]
        )  # UNKNOWN, -1, is the last
        counts = self.phi.counts(made)
        each = counts @ table.T  # (candidates, groups + 1)
        logits = each[np.arange(len(each)), np.repeat(groups, k)].reshape(-1, k)  # (n, K)
        weights = np.cumsum(
            given_weights(logits, (counts @ self.phi.visits).reshape(-1, k), ratio[groups]), axis=1
        )
        streams = [own, *(_stream(seed, AGAIN, draw) for draw in range(1, draws))]
        uniform = np.stack(
            [uniforms(each, first, first + len(groups))[:, 0] for each in streams]
        )  # (draws, n)
        which = (weights <= uniform[..., None] * weights[:, -1:]).sum(-1)  # (draws, n)
        return made.take((k * np.arange(len(groups)) + which).ravel())


def resample(
    model: Generator,
    evidence: Evidence | Moments,
    anchors: Floats | None = None,
    seed: int = 0,
    *,
    pool: int = 2 * POOL,
    candidates: int = CANDIDATES,
    ridge: float = RIDGE,
    tracker: Tracker = SILENT,
) -> Calibration:
    """The whole of `resample`: calibrate a model that knows no groups, on one pool that all groups share."""
    if model.groups is not None:
        raise MobatlasError(
            "resample: this model is conditioned on groups already; calibrate it, or give that of phase 1"
        )
    options: dict[str, Any] = {
        "pool": pool,
        "candidates": candidates,
        "ridge": ridge,
        "tracker": tracker,
    }
    return fit_calibration(model, evidence, anchors, seed, **options)


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Write it into a folder that exists."""
    write_json(folder / FILES[0], calibration.as_dict())
    write_whole(folder / FILES[1], save(calibration.tensors()))


def load_calibration(folder: Path) -> Calibration | None:
    """What `save_calibration` wrote, None where nothing was."""
    if not (folder / FILES[0]).exists():
        return None
    try:
        values = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
        return Calibration.of(values, load_file(folder / FILES[1]))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, MobatlasError):
        raise MobatlasError(
            f"{folder / FILES[0]}: is not a calibration as mobatlas writes it, or its tensors are of another; fit it again"
        ) from None


def _stream(seed: int, stream: int, group: int) -> int:
    """A seed of its own for each form and group: no candidate serves two of them."""
    return int(np.random.SeedSequence([seed, stream, group]).generate_state(1, np.uint64)[0] >> 1)
