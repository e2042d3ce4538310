"""The stream's functions, in Python and in C++, as fixtures."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from cuda_cpp import requires_gxx
from stream_code import PYTHON, Code, compiled_cpp
from tables import QUICK_KERNELS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Tests of the cpu backend with another kernel than `QUICK_KERNELS` are slow."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(Path(__file__).parent):
            values = item.callspec.params if hasattr(item, "callspec") else {}
            kernel = values.get("dtype", "float32"), values.get("antithetic", False)
            if values.get("backend") == "cpu" and kernel not in QUICK_KERNELS:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Code:
    return compiled_cpp(tmp_path_factory.mktemp("stream_code"))


@pytest.fixture(scope="session", params=["python", pytest.param("cpp", marks=requires_gxx)])
def code(request: pytest.FixtureRequest) -> Code:
    """The functions of one language; the test runs once for each."""
    return PYTHON if request.param == "python" else request.getfixturevalue("cpp")  # type: ignore[no-any-return]
