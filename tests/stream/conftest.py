"""The stream's functions, in Python and in C++, as fixtures."""

from __future__ import annotations

import pytest
from cuda_cpp import requires_gxx
from stream_code import PYTHON, Code, compiled_cpp


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Code:
    return compiled_cpp(tmp_path_factory.mktemp("stream_code"))


@pytest.fixture(scope="session", params=["python", pytest.param("cpp", marks=requires_gxx)])
def code(request: pytest.FixtureRequest) -> Code:
    """The functions of one language; the test runs once for each."""
    return PYTHON if request.param == "python" else request.getfixturevalue("cpp")  # type: ignore[no-any-return]
