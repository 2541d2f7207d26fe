"""Unit tests compute with tiny models: threads would only wait for each other."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One torch thread in the test process; engines in processes of their own keep theirs."""
    torch.set_num_threads(1)
