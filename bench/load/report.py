"""What the answers of a load say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.load.tool import Sample
from bench.onboarding_load import percentile
from gti_core.types import JsonDict

ASKED, LIVE = "/v1/recommendations", "/livez"
SHOWN = 5


def answers(samples: Sequence[Sample], seconds: float, skip_s: float = 0.0) -> JsonDict:
    """Answers by status, good ones per second, and latencies of those and of liveness.

    Args:
        samples: of one run of Locust.
        seconds: how long the users asked.
        skip_s: seconds at the start that do not count.
    """
    if not samples:
        raise SystemExit("Locust has no answers")
    first = min(sample.at - sample.ms / 1000 for sample in samples)
    # Users finish the request they are in; what came after the end does not make the rate better.
    inside = [s for s in samples if skip_s <= s.at - first <= seconds]
    asked = [sample for sample in samples if sample.name == ASKED]
    good = [s for s in inside if s.name == ASKED and s.status == 200]
    return {
        "seconds": seconds,
        "offered_per_s": round(sum(s.name == ASKED for s in inside) / (seconds - skip_s), 2),
        "statuses": dict(sorted(Counter(str(sample.status) for sample in asked).items())),
        "errors": sorted({sample.error for sample in samples if sample.error})[:SHOWN],
        "good_per_s": round(len(good) / (seconds - skip_s), 2),
        "good_ms": _latencies([s for s in asked if s.status == 200]),
        "refused_ms": _latencies([s for s in asked if s.status == 429]),
        "livez_ms": _latencies([s for s in samples if s.name == LIVE and s.status == 200]),
        "livez_failed": sum(s.name == LIVE and s.status != 200 for s in samples),
    }


def _latencies(samples: Sequence[Sample]) -> JsonDict | None:
    if not samples:
        return None
    values = [sample.ms for sample in samples]
    shares = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
    return {name: round(percentile(values, share), 1) for name, share in shares}
