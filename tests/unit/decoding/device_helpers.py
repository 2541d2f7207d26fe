"""What the tests of the search on tensors share."""

from __future__ import annotations

import numpy as np

from gti_core.decoding import ConstraintIndex
from gti_core.decoding.device import DeviceIndex, batch_filters


def batch(index, filters, **options):
    device = DeviceIndex(index, base_slots=len(filters), **options)
    for one in filters:
        device.acquire(one.base)
    return device, batch_filters(device, filters)


def small():
    """Items 0..3 at (0,0), (0,2), (1,1), (2,0); item 3 out of service."""
    sids = np.array([[0, 0], [0, 2], [1, 1], [2, 0]], dtype=np.int32)
    return ConstraintIndex(sids, np.array([True, True, True, False]))
