"""What `import multisample`, its submodules and its first call import, and the errors where a library is missing."""

import json
import sys
from typing import Any

import pytest
from processes import run_python

import multisample
from reference import stream

# Modules that `import multisample` may import in addition to NumPy's.
STANDARD_LIBRARY = {
    "__future__", "_hmac", "array", "base64", "binascii", "copy", "hmac", "importlib", "mmap", "secrets", "threading",
    "typing",
    # Imported by dataclasses.
    "_opcode", "_opcode_metadata", "ast", "dataclasses", "dis", "enum", "inspect", "keyword", "linecache", "opcode",
    "reprlib", "token", "tokenize",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels of the programs, which would print a message."""
    for dtype in ("float32", "float16", "bfloat16"):
        multisample.sample([0.0], [1.0], 2, dtype=dtype)


def printed(code: str) -> list[Any]:
    """The lines that `code` prints, read as JSON."""
    run = run_python("-c", code)
    assert run.stderr == ""
    return [json.loads(line) for line in run.stdout.splitlines()]


STAGES = """
import json, sys
import numpy
before = set(sys.modules)
def show(value):
    print(json.dumps(sorted(value) if isinstance(value, set) else value))
import multisample
show(set(sys.modules) - before)
listed = dir(multisample)
assert {"sample", "cem", "examples", "torch"} <= set(listed)
multisample.cem.minimize
show(set(sys.modules) - before)
show(multisample.sample([0.5], [2.0], 4, seed=3).view("u4").tolist())
show(set(sys.modules) - before)
from multisample.examples import tetris
tetris.play
try:
    multisample.nothing
except AttributeError as error:
    show(str(error))
"""

MISSING = """
def attempt(code):
    try:
        print(json.dumps(exec(code)))
    except (ImportError, TypeError) as error:
        print(json.dumps(str(error)))
for name in ("torch", "jax", "dask", "ml_dtypes"):
    sys.modules[name] = None
import numpy as np
for name in ("torch", "jax", "dask"):
    attempt(f"multisample.{name}")
    attempt(f"import multisample.{name}")
    attempt(f"from multisample import {name}")
generator = multisample.Generator(1)
attempt("multisample.sample(np.zeros(2), np.ones(2), 3, dtype='bfloat16', generator=generator)")
listed = [name in dir(multisample) for name in ("torch", "jax")]
print(json.dumps([listed, generator.offset, str(multisample.sample([0.0], [1.0], 2, dtype="float16").dtype)]))
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as page:
    help(multisample)
print(json.dumps("Draw vectors from a normal distribution" in page.getvalue()))
"""
COMMANDS = {
    "torch": "multisample.torch needs PyTorch: pip install 'torch>=2.11' ninja setuptools",
    "jax": "multisample.jax needs JAX: pip install 'jax>=0.10'",
    "dask": "multisample.dask needs Dask: pip install ",
}


def test_numpy_calls_import_no_other_array_library_and_a_missing_one_raises_with_its_pip_command() -> None:
    first, submodules, bits, drawn, error, *errors, narrow, rest, has_help = printed(STAGES + MISSING)
    packages = {name.partition(".")[0] for name in first}
    third_parties = packages - set(sys.stdlib_module_names)
    assert third_parties - {"numpy", "threadpoolctl"} == {"multisample"}  # Where threadpoolctl is installed.
    assert packages - third_parties <= STANDARD_LIBRARY
    ours = {name for name in first if name.startswith("multisample")}
    assert {"multisample", "multisample._sample"} <= ours
    assert not {name for name in ours if any(word in name for word in ("pool", "commands", ".cem", "examples"))}
    # The other modules of kernels import Numba.
    folder = "multisample.backends.kernels"
    allowed = {f"{folder}.cpu", f"{folder}.cpu.floating_point", f"{folder}.cuda"}
    allowed |= {f"{folder}.cuda.{name}geometry" for name in ("", "moments_", "perturb_")}
    assert {name for name in ours if ".kernels." in name} <= allowed
    assert "multisample.cem" in submodules
    assert not {"torch", "cupy", "jax", "jaxlib", "scipy", "ml_dtypes", "dask", "cuda"} & set(submodules)
    assert bits == stream.sample([0.5], [2.0], 4, seed=3)
    assert "numba" in drawn
    assert not {"torch", "cupy", "jax", "dask"} & set(drawn)
    assert error == "module 'multisample' has no attribute 'nothing'"
    for number, message in enumerate(COMMANDS.values()):
        assert all(error.startswith(message) for error in errors[3 * number : 3 * number + 3])
    assert narrow.startswith("dtype: ")
    assert "bfloat16" in narrow and "pip install ml_dtypes" in narrow
    assert rest == [[False, False], 0, "float16"]
    assert has_help


TORCH = """
import json, sys
import multisample.torch
heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "numba"}
import torch
print(json.dumps(sorted(heavy & set(sys.modules)) + [hasattr(torch.ops.multisample, "sample")]))
multisample.sample(torch.zeros(3), 1.0, 2, backend="cpu")
print(json.dumps(["torch.distributed.tensor" in sys.modules, "sample_sharded" in dir(multisample.torch)]))
sys.modules["torch.distributed.tensor"] = None  # Its import takes a second.
try:
    multisample.torch.sample_sharded
except ImportError as error:
    print(json.dumps(error.name))
"""


@pytest.mark.slow
def test_the_torch_submodule_imports_compilers_and_dtensors_on_first_use() -> None:
    pytest.importorskip("torch")
    assert printed(TORCH) == [[False], [False, True], "torch.distributed.tensor"]


REFUSED = """
import json, sys, _thread
interpreters = [("t", True), (sys.abiflags, False)]
for sys.abiflags, is_main in interpreters:
    _thread._is_main_interpreter = lambda: is_main
    try:
        import multisample
    except ImportError as error:
        print(json.dumps(str(error)))
"""


def test_unsupported_interpreters_are_refused() -> None:
    message = "multisample: free-threaded builds of Python and subinterpreters are not supported"
    assert printed(REFUSED) == [message] * 2
