"""Constrained decoding: constraint index and beam search."""

from gti_core.decoding.beam import Beam, BeamSearch, ScoredRow, beam_search, exhaustive_search
from gti_core.decoding.constraint import Admissible, Children, ConstraintIndex

__all__ = [
    "Admissible",
    "Beam",
    "BeamSearch",
    "Children",
    "ConstraintIndex",
    "ScoredRow",
    "beam_search",
    "exhaustive_search",
]
