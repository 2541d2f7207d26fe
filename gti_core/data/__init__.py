"""Item texts and interactions: reading, splitting, the prepared folder, demo data."""

from gti_core.data.dataset import Dataset, Interaction, ItemText
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import EvalCase, Split, chronological, leave_one_out

__all__ = [
    "Dataset",
    "EvalCase",
    "Interaction",
    "ItemText",
    "PreparedData",
    "Split",
    "chronological",
    "leave_one_out",
]
