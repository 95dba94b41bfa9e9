"""The protocol of generators, and the registry of their families.

A generator is a distribution of trajectories x given the anchors z (home and work) of a person.
Phase 1 fits it without groups; phase 2 also conditions it on the person's group d.

Random numbers depend on the seed and the number of a sample alone: a sample is the same whether it
is drawn alone, among others, or in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from mobatlas.config import Section
from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.registry import Registry

if TYPE_CHECKING:  # torch takes seconds to import, and the command line needs only names
    from torch import nn

    from mobatlas.training.loop import Stage, Trainer

UNKNOWN = -1  # the number of a group that is not known
TILE = 256  # samples that a network computes at a time


@dataclass(frozen=True)
class Examples:
    """Examples of one training step.

    Parameters
    ----------
    indices
        (batch,) numbers of trajectories of a dataset.
    groups
        (batch,) numbers of groups, or UNKNOWN.
    """

    indices: Ints
    groups: Ints


# (batch size, step) -> examples. A pure function, so that a resumed run sees the same examples.
Draw = Callable[[int, int], Examples]


class Generator(Protocol):
    """A model of trajectories; all its state is in its networks and its configuration.

    To add a family, write a class with these members, describe it by a `Family`, and pass that
    to `register_generator`. No base class is needed.

    A family that phase 2 cannot train sets `Family.trainable` to False. Strategies then select
    among its samples and never use `network`, `with_groups`, `weighted_fit_stage` and
    `soft_sample`. These four members raise `MobatlasError`, as those of `external` do.

    A generator whose samples carry arrival and departure times also has the attribute
    `has_times`, which is True.

    Examples
    --------
    Sample 100 trajectories of a trained model:

    >>> from mobatlas import load_model
    >>> load_model("model").generator.sample(100, seed=1)  # doctest: +SKIP
    """

    @property
    def config(self) -> Section:
        """The options of the family, an instance of `Family.config` with all values filled in.

        They are saved with the model and passed to `Family.load`.
        """

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of its trajectories; the vocabulary of the dataset it was trained on."""

    @property
    def groups(self) -> Groups | None:
        """The groups it is conditioned on; None after phase 1."""

    @property
    def max_length(self) -> int:
        """The number of tokens in its longest possible trajectory."""

    @property
    def tile(self) -> int:
        """The number of samples it computes at a time.

        Sample number i depends on the seed and on i alone, never on how many samples are drawn.
        """

    @property
    def network(self) -> nn.Module:
        """The network that phase 2 trains; its parameters include those of the groups."""

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Fit phase 1, without groups, on the training split.

        Parameters
        ----------
        dataset
            Its labels must not be read.
        trainer
            Has the seed and the device. Its method `run` trains a `Stage` and writes checkpoints.

        Returns
        -------
        dict
            Numbers for the report: losses, reconstruction, truncated trajectories.
        """

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, equal_groups: bool = False
    ) -> Generator:
        """Return a copy that is conditioned on groups.

        Parameters
        ----------
        groups
            The groups to add.
        seed
            Seed of the new weights.
        fresh
            Start from new random weights. Otherwise, for people of unknown group, the copy samples
            what this model samples.
        equal_groups
            Start every group with the distribution of the unknown group. Weighted examples train
            faster from groups that differ at the start.

        Returns
        -------
        Generator
            The copy, on the same device. Its `groups` are the ones passed.
        """

    def weighted_fit_stage(
        self,
        dataset: TrajectoryDataset,
        draw: Draw,
        name: str,
        trainer: Trainer,
        *,
        fresh: bool = False,
    ) -> Stage:
        """Return the stage that trains on the examples (x, z, d) of `draw`.

        Parameters
        ----------
        dataset
            The dataset that the numbers of examples refer to.
        draw
            (batch size, step) -> the examples of a step. The weight of an example is how often
            it is drawn.
        name
            Name of the stage; its random numbers and checkpoints depend on it.
        trainer
            The trainer that will run the stage.
        fresh
            Use the steps and the learning rate of phase 1, for new weights. Otherwise use those for
            continuing from phase 1.

        Returns
        -------
        Stage
            Trains `network` when `trainer.run` is called with it.
        """

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
    ) -> Trajectories:
        """Draw samples number `first` to `first + n` of a seed.

        Parameters
        ----------
        n
            How many samples.
        groups
            (n,) numbers of groups, or UNKNOWN.
        anchors
            (n, 4) home latitude, longitude, work latitude, longitude; NaN where unknown.
        seed
            Random seed.
        first
            Number of the first sample.

        Returns
        -------
        Trajectories
            n samples with the requested anchors.

        Raises
        ------
        MobatlasError
            If a group is requested from a generator that has no groups.
        """

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
        """Return the token distributions behind the samples of a seed, differentiable in `network`.

        The keyword arguments are for families that sample in steps, such as diffusion. Other
        families ignore them.

        Parameters
        ----------
        groups, anchors, seed
            As in `sample`.
        steps
            How many steps; by default as many as `sample` takes.
        differentiable
            The gradient flows through this many last steps.
        early
            Stop at a random step that the seed determines. The expected tokens have the same mean.

        Returns
        -------
        SoftTrajectories
            Probabilities of tokens (n, places, vocabulary), zero after the end of a trajectory.
        """

    def to(self, device: str) -> None:
        """Move the networks to "cpu", "cuda" or "mps"."""

    def save(self, folder: Path) -> None:
        """Write the weights into an existing folder, for `Family.load` to read.

        The vocabulary, the groups and `config` are saved by the caller.
        """


def has_times(generator: Generator) -> bool:
    """Whether the samples of a generator carry arrival and departure times."""
    return bool(getattr(generator, "has_times", False))


@dataclass(frozen=True)
class Family:
    """A family of generators: its options, and how to create and load one.

    Parameters
    ----------
    name
        The name that it is registered by.
    config
        The class of its options, a subclass of `Section` with a default for every field. Users
        set a field with `--set FIELD=VALUE`.
    presets
        Options by name of preset, for `--preset`. Other options keep their defaults.
    create
        (config, dataset, seed) -> an untrained generator.
    load
        (folder, config, vocabulary, groups) -> the generator that `Generator.save` wrote.
        `groups` is None for a model of phase 1.
    trainable
        Whether it has a network that phase 2 can train. If not, strategies select among its
        samples.
    resolve
        (options of a user, folder that paths are relative to) -> options. A family whose options
        name files checks here that they exist. By default the options stay as they are.
    """

    name: str
    config: type[Section]
    presets: Mapping[str, Mapping[str, Any]]
    create: Callable[[Any, TrajectoryDataset, int], Generator]
    load: Callable[[Path, Any, Vocabulary, Groups | None], Generator]
    trainable: bool = True
    resolve: Callable[[Mapping[str, Any], Path], dict[str, Any]] = lambda values, _: dict(values)


def _import_family(module: str) -> Family:
    return cast(Family, import_module(f"mobatlas.generators.{module}").FAMILY)


GENERATORS: Registry[Callable[[], Family]] = Registry(
    "generator",
    "--generator",
    {
        "latent-diffusion": partial(_import_family, "latent_diffusion.generator"),
        "autoregressive": partial(_import_family, "autoregressive"),
        "vae": partial(_import_family, "vae"),
        "point-process": partial(_import_family, "point_process"),
        "external": partial(_import_family, "external"),
    },
)


def register_generator(name: str, family: Callable[[], Family]) -> None:
    """Add a family of generators.

    Parameters
    ----------
    name
        The name that users choose it by (`--generator NAME`). A name can be registered once.
    family
        A function without arguments that returns the family. It is called when the family is
        first needed, so imports inside it cost nothing before.

    Examples
    --------
    `Markov` is a class with the members of `Generator`:

    >>> from mobatlas import register_generator
    >>> from mobatlas.config import Section
    >>> from mobatlas.generators.protocol import Family
    >>> class MarkovConfig(Section):
    ...     order: int = 1
    >>> def create(config, dataset, seed):
    ...     return Markov(config, dataset.vocabulary, None)
    >>> def load(folder, config, vocabulary, groups):
    ...     return Markov.read(folder / "counts.npz", config, vocabulary)
    >>> def family():
    ...     presets = {"small": {}, "paper": {"order": 3}}
    ...     return Family("markov", MarkovConfig, presets, create, load, trainable=False)
    >>> register_generator("markov", family)  # doctest: +SKIP
    """
    GENERATORS.register(name, family)


def family_of(name: str) -> Family:
    """Return the family of that name."""
    return GENERATORS.get_entry(name)()


def unlabelled(dataset: TrajectoryDataset, seed: int, split: str = "train") -> Draw:
    """Draw every trajectory of a split once per epoch, with unknown group."""

    def draw(size: int, step: int) -> Examples:
        indices = dataset.order(split, size, seed, step)
        return Examples(indices, np.full(size, UNKNOWN, dtype=np.int64))

    return draw


def uniforms(seed: int, start: int, stop: int, stream: int = 0) -> Floats:
    """Return four numbers in [0, 1) for each sample number from `start` to `stop`: (n, 4)."""
    # Philox produces four numbers at a time and can start at any position.
    bits = np.random.Philox(np.random.SeedSequence([seed, stream, 1])).advance(start)
    return np.random.Generator(bits).random((stop - start, 4))


def draw_rows(uniform: Floats, rows: int, weights: Floats | Ints | None = None) -> Ints:
    """Return a row number for each uniform number, equally likely or by `weights` (rows,)."""
    if weights is None:
        return (uniform * rows).astype(np.int64)
    total = np.cumsum(weights, dtype=np.float64)
    if not 0 < total[-1] < np.inf:
        raise MobatlasError("cannot draw: the weights sum to zero or are not finite numbers")
    return np.searchsorted(total / total[-1], uniform, side="right")


class Tile(NamedTuple):
    """A tile of TILE samples, and the part of it that is needed."""

    number: int
    rows: slice  # of the samples that are needed
    places: slice  # of the tile, where these samples are

    def spread(self, values: Any) -> Any:
        """Return values of the needed rows at their places of the tile: (TILE, ...).

        The other places repeat the first value; their samples are discarded.
        """
        needed = values[self.rows]
        out = np.repeat(needed[:1], TILE, axis=0)
        out[self.places] = needed
        return out


def tiles(first: int, n: int) -> Iterator[Tile]:
    """Yield the tiles that hold samples `first` to `first + n`."""
    for number in range(first // TILE, -(-(first + n) // TILE)):
        begin = number * TILE
        start = max(first, begin)
        stop = min(first + n, begin + TILE)
        yield Tile(number, slice(start - first, stop - first), slice(start - begin, stop - begin))
