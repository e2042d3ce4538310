"""Clusters of worker processes on this machine, for the tests of Dask and of executors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def local_cluster(**options: Any) -> Iterator[Any]:
    """A client of two worker processes with two threads each. Without `distributed`, the test skips."""
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 2, "memory_limit": 0, "dashboard_address": ":0", **options}
    cluster = distributed.LocalCluster(processes=True, **settings)
    with cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield client
