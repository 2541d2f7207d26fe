"""The worker's process with `FakeGrounder`: ``python fake_worker.py BUNDLE STORE [options]``."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from fake_grounder import FakeGrounder

from gti_core.bundle import load_bundle
from gti_core.bundle.delta import CatalogState
from gti_core.data.dataset import ItemText
from gti_core.onboarding.proposal import Proposal, Report
from service.onboarding.worker_process import open_store, work


class SlowGrounder(FakeGrounder):
    """Takes a minute over a title "slow"."""

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        if any(item.title == "slow" for item in items):
            for step in range(600):
                report("grounding", step % len(items), len(items))
                time.sleep(0.1)
        return super().propose(state, items, first_code, report)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("store")
    parser.add_argument("--name")
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    bundle = load_bundle(options.bundle)
    store = open_store(options.store, bundle)
    work(store, bundle, SlowGrounder(), name=options.name, parent=options.parent)


if __name__ == "__main__":
    main()
