"""Marks of modules that start a real vLLM."""

from __future__ import annotations

import pytest

STARTS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    # vLLM's imports touch torch's deprecated names.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
