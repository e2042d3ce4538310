"""`get_include`: where C++ and CUDA C++ compilers find the stream's header."""

from __future__ import annotations


def get_include() -> str:
    """Return the include folder of the C++ header with the normals of `multisample.sample`.

    ``#include <multisample/normal.h>`` gives ``multisample::Stream`` to host and device code: nvcc, NVRTC, g++ and
    clang++, C++17. The page `csrc/include/README.md` is for people who write kernels.

    Returns
    -------
    str
        The path of a folder, for the compiler's option ``-I``.

    Raises
    ------
    RuntimeError
        If multisample is imported from an archive, where compilers cannot read the header.

    Examples
    --------
    >>> from pathlib import Path
    >>> import multisample
    >>> Path(multisample.get_include(), "multisample", "normal.h").is_file()
    True

    With CuPy, in a kernel that adds a normal to each element:

    >>> source = r'''
    ... #include <multisample/normal.h>
    ... extern "C" __global__ void diffuse(float* x, unsigned n, unsigned long long seed, unsigned step) {
    ...   const unsigned j = blockIdx.x * blockDim.x + threadIdx.x;
    ...   if (j < n) x[j] += multisample::Stream(seed).normal(step, j);
    ... }'''
    >>> options = ("-std=c++17", f"-I{multisample.get_include()}")
    >>> import cupy  # doctest: +SKIP
    >>> diffuse = cupy.RawKernel(source, "diffuse", options)  # doctest: +SKIP
    """
    from multisample.backends.native import csrc_files  # Sampling does not need it.

    if missing := csrc_files.missing():
        raise RuntimeError(f"get_include: {missing[0]}")
    return str(csrc_files.folder() / "include")
