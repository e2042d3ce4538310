"""The stream in Triton kernels of users, `multisample.triton`: same bits as `multisample.sample`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cpp import SECONDS
from known_normals import known_f32, random_places, sampled, sampled_row
from processes import run_python
from ptx_reader import opcodes_of

import multisample

triton = pytest.importorskip("triton")
from triton_kernels import points, shifted_groups  # noqa: E402

BLOCK = 128
SHIFT = np.float32(0.7)

SIGNATURES = {
    points: {"seed": "*u64", "offset": "*u64", "i": "*u32", "j": "*i64", "z": "*fp32"},
    shifted_groups: {"seed": "u64", "offset": "u64", "i": "u32", "shift": "fp32", "z": "*fp32"},
}


@pytest.fixture(params=[True, False], ids=["fused", "not fused"])
def fused(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return bool(request.param)


def compiled(function: Any, fused: bool) -> str:
    """The parameters and the body in PTX."""
    from triton.backends.compiler import GPUTarget

    signature = {**SIGNATURES[function], "block": "constexpr"}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs={"block": BLOCK})
    options = {"num_warps": 4, "enable_fp_fusion": fused}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    _, body = kernel.asm["ptx"].split(".entry")
    return str(body)


@pytest.mark.parametrize(("function", "pairs"), [(points, 1), (shifted_groups, 2)], ids=["normal", "normals4"])
def test_normals_cost_one_block_of_words_and_only_the_pairs_used(function: Any, pairs: int, fused: bool) -> None:
    found = opcodes_of(compiled(function, fused))
    assert found["rsqrt.approx.ftz.f32"] == pairs and found["fma.rn.f32"] == 20 * pairs
    assert found["mul.wide.u32"] == 20
    assert not {"mul.f32", "mul.ftz.f32"} & set(found)  # Which a compiler would contract with the caller's addition.


def test_the_interpreter_of_triton_gives_the_same_bits(tmp_path: Path) -> None:
    """Triton chooses the interpreter when it is imported."""
    places, known = known_f32()
    more = random_places(4096 - known.size, seed=3)
    arguments = [np.concatenate(x) for x in zip(places, more, strict=True)]
    seed, offset, i = 2**64 - 9, 2**33 + 5, 2**32 - 1
    np.savez(
        tmp_path / "expected.npz", *arguments, points=np.concatenate([known, sampled(more)]),
        row=sampled_row(seed, offset, i, 1024) + SHIFT,
        column=multisample.sample([0.0] * BLOCK, 1.0, 7, seed=multisample.Key(2**63 + 1, 3), backend="cpu")[:, 6],
    )  # fmt: skip
    program = f"""
import numpy as np, torch
from triton_kernels import literals, points, shifted_groups, shifted_row

def check(kernel, blocks, *arguments, like):
    z = torch.zeros(like.size)
    kernel[(blocks,)](*arguments, z, {BLOCK})
    assert z.numpy().tobytes() == like.tobytes(), kernel

saved = np.load("expected.npz")
check(points, 32, *[torch.from_numpy(saved[f"arr_{{k}}"]) for k in range(4)], like=saved["points"])
number = {seed}, {offset}, {i}, {float(SHIFT)!r}
check(shifted_row, 8, *number, like=saved["row"])
check(shifted_groups, 2, *number, like=saved["row"])
check(literals, 1, like=saved["column"])
"""
    run_python("-W", "error", "-c", program, folder=tmp_path, TRITON_INTERPRET="1")


def test_without_triton_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['triton'] = None; import multisample; multisample.triton"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert "ImportError: multisample.triton needs Triton: pip install triton" in done.stderr
