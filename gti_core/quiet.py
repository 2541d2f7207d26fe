"""Keeping other libraries' bars and chatter off the terminal, and all of them off the network."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """Call before transformers is first used. What the operator set in the environment stays.

    Progress is reported by this project's own bars and log lines.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Read when tqdm is imported; transformers' GGUF reader draws a bar of its own with it.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
