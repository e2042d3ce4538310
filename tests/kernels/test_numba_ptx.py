"""The PTX of the plain kernels in Python, without a GPU.

No compiler may change a kernel's numbers. PTX's rules let the driver fuse a product with the sum that uses it, so no
sum may use a plain product.
"""

from __future__ import annotations

import importlib.resources
import json
import re

import pytest
from numba_ptx import numba_ptx, requires_libnvvm
from ptx_reader import opcodes_of, sums_of_products, unexpected_operations
from tables import DTYPES, STORE_KINDS, VARIANTS

from multisample.backends.kernels.cuda import geometry, group, parameters
from multisample.backends.launch import Launch, pack

THREADS = {"plain": geometry.PLAIN_THREADS, "plain_transposed": geometry.PLAIN_TRANSPOSED_THREADS}
COMPILE = """
from multisample.backends.kernels.cuda import compilation, keys, parameters

for variant, capability in json.loads(sys.argv[1]):
    kernel = compilation.kernel_of(keys.KernelKey(*variant, False, False, 0), tuple(capability))
    bounds = kernel.targetoptions["launch_bounds"]
    found[str((*variant, *capability))] = compiled(
        kernel.py_func, parameters.SIGNATURE.args, tuple(capability), launch_bounds=bounds
    )
"""


@pytest.mark.slow  # Compiling a kernel takes up to a second.
@requires_libnvvm
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_have_only_the_operations_of_the_stream(dtype: str) -> None:
    plain = [variant for variant in VARIANTS if variant[0] == dtype and STORE_KINDS[variant[4]] in THREADS]
    jobs = [(variant, (9, 0)) for variant in plain] + [(plain[0], (7, 5))]
    for job, ptx in zip(jobs, numba_ptx(COMPILE, json.dumps(jobs)).values(), strict=True):
        (_, _, _, fast, store_kind), capability = job
        assert ptx.count(".entry") == 1 and not re.search(r"\.(func|extern)\b|\.local\b|__local_depot", ptx), job
        _, _, kernel = ptx.partition(".entry")
        found = opcodes_of(kernel)
        assert found["ret"] > 0 and sum(found.values()) > 300, job
        assert not unexpected_operations(found, dtype, fast), job
        assert not sums_of_products(kernel), job
        # Devices before 8.0 round to bfloat16 without an instruction.
        assert capability >= (8, 0) or "cvt.rn.bf16.f32" not in found, job
        threads, blocks = (int(re.findall(rf"\.{name}\s+(\d+)", kernel)[0]) for name in ("maxntid", "minnctapersm"))
        assert threads == THREADS[STORE_KINDS[store_kind]], job
        # ptxas ignores a bound that exceeds the threads of a multiprocessor.
        assert 2 * threads <= threads * blocks <= (1024 if capability == (7, 5) else 2048), job


def test_a_sum_of_a_plain_product_is_found() -> None:
    wrong = ".entry f() {\n mul.f32 %f3, %f2, %f2;\n neg.f32 %f4, %f3;\n add.f32 %f5, %f4, %f1;\n}"
    assert sums_of_products(wrong) == ["%f5"]
    assert sums_of_products(wrong.replace("mul.f32", "mul.rn.f32")) == []


def test_parameters_match_the_packed_bytes() -> None:
    """Every field has a different value, which the kernel's parameters read at the expected offset."""
    count = len(Launch._fields)
    expected = [*range(1, 1 + count + len(geometry.Geometry._fields))]
    packed = pack(Launch(*expected[:count])) + geometry._STRUCT.pack(*expected[count:])
    found, end = [], 0
    for kind in (*parameters.LAUNCH.types, *parameters.GEOMETRY.types):
        size = kind.bitwidth // 8
        begin = -(-end // size) * size
        end = begin + size
        found.append(int.from_bytes(packed[begin:end], "little"))
    assert found == expected and end == len(packed)


def test_fast_math_has_the_constants_of_the_stream() -> None:
    text = (importlib.resources.files("multisample") / "STREAM.md").read_text()
    section = re.split(r"^### fast_math.*$", text, flags=re.M)[1].split("\n## ")[0].split("\n### ")[0]
    numbers = [float.fromhex(number) for number in re.findall(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", section)]
    assert numbers == [group._MINUS_2_LN_2, group._TO_ANGLE]
    assert (group._TO_UNIT, group._TO_UNIT_HALF) == (2.0**-32, 2.0**-33)
