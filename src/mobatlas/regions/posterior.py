"""Draws of group means from their posterior; places move with their category."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.features.maps import pair_name

CATEGORY = "category:"
ROUNDS = 3  # of scaling transitions to either category
EQUAL = 1e-9  # a smaller difference of variances is a rounding error


@dataclass(frozen=True)
class Families:
    """The parent of each feature, and the errors that features of one parent share.

    An error in the mean of a category moves all its places. A parent is in its own family.
    """

    names: tuple[str, ...]  # of the parents
    parent: Ints  # (features,) number of the parent, -1 for none
    covariance: Floats  # (parents, groups, groups) of log M of the parents

    @classmethod
    def of(
        cls, features: Sequence[str], log_covariance: Floats, parents: Mapping[str, str]
    ) -> Self:
        """The families of features whose covariance includes that of their parent."""
        position = {name: number for number, name in enumerate(features)}
        names = dict.fromkeys(parents[name] for name in features if parents.get(name) in position)
        rows = np.array([position[name] for name in names], dtype=np.int64)
        number = {name: k for k, name in enumerate(names)}
        parent = np.array([number.get(parents.get(name, name), -1) for name in features])
        variances = np.diagonal(log_covariance, axis1=1, axis2=2)  # (features, groups)
        inherits = np.zeros(len(features), dtype=bool)
        if names:
            inherits = (variances >= variances[rows][parent] - EQUAL).all(1)
        return cls(tuple(names), np.where(inherits, parent, -1), log_covariance[rows])

    def select(self, size: int) -> Self:
        """The families of the first features."""
        return replace(self, parent=self.parent[:size])


@dataclass(frozen=True)
class Posterior:
    """The posterior of group means: Gaussian errors of log M.

    Examples
    --------
    >>> two = np.eye(2)[None] / 100  # variances of two groups
    >>> Posterior(("poi:gym",), np.array([[1.0], [2]]), two).draws(5, seed=1).shape
    (5, 2, 1)
    """

    features: tuple[str, ...]
    medians: Floats  # (groups, features)
    log_covariance: Floats  # (features, groups, groups), or variances (features, groups)
    families: Families | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the covariance of groups is known; without it, groups are independent."""
        return self.log_covariance.ndim == 3

    def draws(self, n: int, seed: int = 0) -> Floats:
        """Draws of M (n, groups, features); draw number k does not depend on n.

        The places of a category have its error in common, and transitions from and to a category
        move with it. Apart from this, features are independent. Sums of places are not scaled to
        their category: that would make places which dominate it too certain.
        """
        pairs = _category_pairs(self.features)
        return np.array([self._with_transitions(each, *pairs) for each in self._draws(n, seed)])

    def _with_transitions(self, means: Floats, transitions: Ints, ends: Ints) -> Floats:
        """Scale transitions (pairs,) such that sums by either end (pairs, 2) follow categories."""
        for _ in range(ROUNDS if len(transitions) else 0):
            for end in ends.T:
                category, number = np.unique(end, return_inverse=True)
                member = np.arange(len(category)) == number[:, None]  # (pairs, categories)
                wanted = self.medians[:, transitions] @ member * means[:, category]
                current = means[:, transitions] @ member * self.medians[:, category]
                means[:, transitions] *= _ratio(wanted, current)[:, number]
        return means

    def _draws(self, n: int, seed: int) -> Iterator[Floats]:
        root = _roots(self.log_covariance)
        rng = np.random.default_rng(seed)
        families = self.families
        if families is None or not len(families.names):
            for _ in range(n):
                yield self.medians * np.exp(_correlated(root, rng))
            return
        known = families.parent >= 0
        parent = families.parent[known]
        root[known] = _roots(self.log_covariance[known] - families.covariance[parent])
        common_root = _roots(families.covariance)
        common_rng = np.random.default_rng([seed, 1])  # another stream
        for _ in range(n):
            common = _correlated(common_root, common_rng)  # (groups, parents)
            means = self.medians * np.exp(_correlated(root, rng))
            means[:, known] *= np.exp(common[:, parent])
            yield means


def _ratio(wanted: Floats, current: Floats) -> Floats:
    """Factors to reach the wanted sums; 1 where there is nothing to scale."""
    return np.where(current > 0, wanted / np.where(current > 0, current, 1.0), 1.0)


def _category_pairs(features: Sequence[str]) -> tuple[Ints, Ints]:
    """The numbers of transitions (pairs,), and of the categories at their ends (pairs, 2)."""
    position = {name: number for number, name in enumerate(features)}
    categories = {
        pair_name(name.removeprefix(CATEGORY)): number
        for name, number in position.items()
        if name.startswith(CATEGORY)
    }
    found = [
        (position[name], first, second)
        for start, first in categories.items()
        for end, second in categories.items()
        if (name := f"transitions:{start}>{end}") in position
    ]
    rows = np.array(found, dtype=np.int64).reshape(-1, 3)
    return rows[:, 0], rows[:, 1:]


def _roots(covariance: Floats) -> Floats:
    """A root of each covariance (rows, groups, groups), or of variances (rows, groups)."""
    if covariance.ndim == 2:
        return np.sqrt(covariance)
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0))[:, None])


def _correlated(root: Floats, rng: np.random.Generator) -> Floats:
    """Gaussian noise (groups, rows) with the covariances that `_roots` had."""
    noise = rng.normal(size=root.shape[:2])
    return (root * noise).T if root.ndim == 2 else np.einsum("jab,jb->aj", root, noise)
