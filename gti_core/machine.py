"""What a figure was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from gti_core.types import JsonDict


def machine() -> JsonDict:
    """Platform, processor, cores, torch's version and threads, and today's date (UTC)."""
    import torch

    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
