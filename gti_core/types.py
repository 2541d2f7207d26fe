"""Shared types and the one legend of shape letters.

Shapes everywhere in this project: B batch, W beam width, L levels, K codebook size,
S rows of the SID vocabulary, V vocabulary of the backbone, N items, D model width,
T tokens, E width of the text encoder.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ItemId: TypeAlias = str
"""External item id. Always a string, whatever the source file holds."""

Sid: TypeAlias = tuple[int, ...]
"""Semantic ID: one code per level."""

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int32]
LongArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
JsonDict: TypeAlias = dict[str, Any]
