"""Types of the arrays that functions take and return."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.int32]
