"""What every generator answers, and the registry of families.

A generator is a distribution of trajectories given where a person lives and works (z) and, once it was taught, the person's
group (d). Phase 1 fits it without groups; phase 2 adds tables for them and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mobatlas.config import Section
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups

if TYPE_CHECKING:
    from torch import nn

    from mobatlas.training.loop import Stage, Trainer

UNKNOWN = -1  # a group that is not known: the null condition
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Examples:
    """What one step learns from: trajectories of a dataset, each with its group or UNKNOWN."""

    indices: Ints  # (batch,)
    groups: Ints  # (batch,)


# The examples of a step, (batch size, step) -> examples: a pure function, so that a resumed run sees what it would have seen.
Draw = Callable[[int, int], Examples]


class Generator(Protocol):
    """A family of models; all state is in its networks and its configuration."""

    @property
    def config(self) -> Section: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def groups(self) -> Groups | None:
        """The groups it can be conditioned on; None after phase 1, which knows none."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest trajectory that it can make."""
        ...

    @property
    def tile(self) -> int:
        """Samples are computed in tiles of this many, whatever is asked for, so that bytes do not depend on it."""
        ...

    @property
    def network(self) -> nn.Module:
        """What phase 2 goes on training."""
        ...

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Phase 1, without groups; returns what to report (reconstruction, losses, truncated trajectories)."""
        ...

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, alike: bool = False
    ) -> Generator:
        """A copy that can be told groups; without one it samples what this one does, unless it begins `fresh`.

        If groups begin `alike`, it does so with any of them; what is taught examples of groups learns faster from unlike ones.
        """
        ...

    def weighted_fit_stage(
        self,
        dataset: TrajectoryDataset,
        draw: Draw,
        name: str,
        trainer: Trainer,
        *,
        fresh: bool = False,
    ) -> Stage:
        """The stage that goes on training with (x, z, d) as drawn, or trains anew on them."""
        ...

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
        lengths: Ints | None = None,
    ) -> Trajectories:
        """Trajectories number `first` to `first + n` of that seed, one for each group and each row of anchors.

        `groups` (n,) are numbers of groups or UNKNOWN; `anchors` (n, 4) are home lat, lon, work lat, lon, NaN where unknown;
        `lengths` (n,) forces the number of tokens.
        """
        ...

    def soft_sample(
        self,
        groups: Ints,
        anchors: Floats,
        seed: int,
        *,
        steps: int | None = None,
        differentiable: int = 1,
        early: bool = False,
    ) -> SoftTrajectories:
        """Distributions over tokens behind those that `sample` writes for that seed, differentiable in `network`.

        A family that samples in steps may be asked for fewer `steps`, passes the gradient through the last `differentiable`
        ones, and if `early` ends at a step chosen by the seed: what it expects to write then has the same mean. To a family
        that writes token after token these mean nothing.
        """
        ...

    def to(self, device: str) -> None:
        """Move the networks: "cpu", "cuda" or "mps"."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights into a folder that exists."""
        ...


def _as_given(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return dict(values)


def has_times(generator: Generator) -> bool:
    """Whether its samples say when; a generator that does has `has_times`, true."""
    return bool(getattr(generator, "has_times", False))


@dataclass(frozen=True)
class Family:
    """A kind of generator: how it is configured, made and read."""

    name: str
    config: type[Section]
    presets: Mapping[str, Mapping[str, Any]]
    create: Callable[[Any, TrajectoryDataset, int], Generator]  # (config, dataset, seed)
    load: Callable[
        [Path, Any, Vocabulary, Groups | None], Generator
    ]  # (folder, config, vocabulary, groups)
    trainable: bool = (
        True  # has a network that phase 2 can train; if not, strategies choose among its samples
    )
    # (options from a user's own hand, folder that files are relative to) -> options; refuses files that are not there
    resolve: Callable[[Mapping[str, Any], Path], dict[str, Any]] = _as_given


_FAMILIES: dict[str, Callable[[], Family]] = {}


def register_generator(name: str, family: Callable[[], Family]) -> None:
    """Add a family; it is imported when it is first asked for."""
    if name in _FAMILIES:
        raise MobatlasError(f"generator '{name}' exists already; choose another name")
    _FAMILIES[name] = family


def generator_names() -> tuple[str, ...]:
    """The families there are."""
    return tuple(_FAMILIES)


def family_of(name: str) -> Family:
    """The family of that name."""
    if name not in _FAMILIES:
        raise MobatlasError(
            f"--generator {name} does not exist{suggestion(name, _FAMILIES)} (known: {', '.join(_FAMILIES)})"
        )
    return _FAMILIES[name]()


def unlabelled(dataset: TrajectoryDataset, seed: int, split: str = "train") -> Draw:
    """All trajectories of a split once an epoch, group unknown."""

    def draw(size: int, step: int) -> Examples:
        indices = dataset.order(split, size, seed, step)
        return Examples(indices, np.full(size, UNKNOWN, dtype=np.int64))

    return draw


def _of(module: str) -> Callable[[], Family]:
    """The family that a module defines; some take seconds to import."""

    def family() -> Family:
        found: Family = import_module(f"mobatlas.generators.{module}").FAMILY
        return found

    return family


register_generator("latent-diffusion", _of("latent_diffusion.generator"))
register_generator("autoregressive", _of("autoregressive.generator"))
register_generator("vae", _of("vae"))
register_generator("point-process", _of("point_process.generator"))
register_generator("external", _of("external.generator"))
