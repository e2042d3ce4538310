"""A cluster of one worker process, which all tests of a session share."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    from dask_cluster import local_cluster

    with local_cluster(n_workers=1) as client:
        yield client


@pytest.fixture(autouse=True)
def quiet_libraries() -> Iterator[None]:
    """Warnings of Dask and distributed about the load of this machine fail no test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"(distributed|tornado|dask)\.")
        yield
