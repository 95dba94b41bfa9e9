"""Samples that reproduce a long or rare training trajectory; `generate --reject-copies`.

The comparison uses hashes of the dataset's trajectories; nothing is stored in the model.
"""

from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pandas as pd

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Flags

LONG = 10  # tokens: as long a trajectory is not reproduced by chance
RARE = 3  # people at most who have a rare trajectory
ATTEMPTS = 5  # to redraw a copy
STREAM = 2  # of random numbers


def protected_trajectories(dataset: TrajectoryDataset, longest: int) -> frozenset[bytes]:
    """Hashes of training trajectories that are long or rare, cut as the generator saw them."""
    training = Trajectories.of(dataset, dataset.split("train")).cut(longest)
    table = pd.DataFrame({"hash": _hashes(training), "person": training.people})
    is_rare = table.groupby("hash")["person"].transform("nunique") <= RARE
    return frozenset(table["hash"][is_rare | (np.diff(training.offsets) >= LONG)])


def find_copies(samples: Trajectories, protected: frozenset[bytes]) -> Flags:
    """Whether each sample (samples,) has exactly the tokens of a protected trajectory."""
    return np.array([each in protected for each in _hashes(samples)], dtype=bool)


def redraw_seed(seed: int, attempt: int) -> int:
    """The seed of another attempt; sample i stays a function of (seed, i)."""
    sequence = np.random.SeedSequence([seed, attempt, STREAM])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _hashes(trajectories: Trajectories) -> list[bytes]:
    tokens = trajectories.tokens.astype(np.int32)
    return [
        blake2b(tokens[start:stop].tobytes(), digest_size=16).digest()
        for start, stop in pairwise(trajectories.offsets.tolist())
    ]
