"""Compiles with Numba once per machine, not once per process.

Numba's own disk cache checks only the file of a function, not the functions that it calls. It has its own environment
variables, and it unpickles any file. So this module keeps compiled kernels in `cache`, named by a digest of their
dependencies.
"""

import contextlib
import functools
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeAlias

import llvmlite
import numba
from numba import types
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from multisample.backends.errors import BackendUnavailableError
from multisample.backends.system import cache, forks, sources

forks.hold_compiler_lock()  # Numba has imported logging.

Function: TypeAlias = Callable[..., Any]
"""A function that Numba compiles. Numba infers the types."""

FOLDER = "numba"
"""The folder, in the cache, of kernels that Numba compiles."""
# Settings of Numba that change machine code. Those of the processor are in `Codegen.magic_tuple`.
_SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "EXTEND_VARIABLE_LIFETIMES",
    "ENABLE_PROFILING", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "USING_SVML",
)  # fmt: skip
# Passes of Numba's compiler for what no kernel has: closures, array expressions, lists, context managers and so on.
_UNUSED_PASSES = {
    "DumpParforDiagnostics", "FindLiterallyCalls", "InlineClosureLikes", "InlineInlinables", "InlineOverloads",
    "LiteralPropagationSubPipelinePass", "LiteralUnroll", "MakeFunctionToJitFunction", "NopythonRewrites",
    "RewriteDynamicRaises", "WithLifting",
}  # fmt: skip


class _Code(JITCodeLibrary):
    """The code of a kernel, in which LLVM may use 512-bit vectors, if the processor has them.

    On Intel's processors LLVM prefers 256 bits, because a few wide vectors may lower the clock of much other code.
    """

    def add_ir_module(self, module: Any) -> None:
        for function in module.functions:
            if not function.is_declaration:
                # `add` of this set refuses attributes that are pairs of strings.
                set.add(function.attributes, '"prefer-vector-width"="512"')
        super().add_ir_module(module)


class _CodeOfCallee(_Code):
    """The code of a callee. LLVM optimizes it, and makes machine code of it, in the kernels that link it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _Compiler(Compiler):
    """Numba's compiler without passes that change no kernel. They took about 15 % of a first draw."""

    def define_pipelines(self) -> Any:
        (passes,) = super().define_pipelines()
        passes.passes = [item for item in passes.passes if item[0].__name__ not in _UNUSED_PASSES]
        return [passes]


class _KernelCompiler(_Compiler):
    """The machine code goes into a `_Code`."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        library = _Code(target.codegen(), "kernel")
        library.enable_object_caching()
        super().__init__(typing, target, library, *rest)


class _CalleeCompiler(_Compiler):
    """The compiler up to LLVM's code. It makes no wrappers for callers in Python and C."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing, target, _CodeOfCallee(target.codegen(), "callee"), *rest)
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Compile or load kernels, also where NUMBA_DISABLE_JIT is set, since kernels cannot run in the interpreter.

    The garbage collector pauses: with PyTorch or JAX imported, collections took a tenth of a first draw.
    """
    with global_compiler_lock:  # A fork takes the lock too, so no child is left without a collector.
        collects, before = gc.isenabled(), config.DISABLE_JIT
        gc.disable()
        config.DISABLE_JIT = 0  # Numba's own functions are compiled now, and obey the variable.
        try:
            yield
        finally:
            config.DISABLE_JIT = before
            if collects:
                gc.enable()


class _Dispatcher(CPUDispatcher):
    def compile(self, signature: Any) -> Any:
        with _compiling():
            return super().compile(signature)


class _Callee(CPUDispatcher):
    """A function that only compiled functions call."""

    def __init__(self, function: Any, types_of_locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(function, types_of_locals or {}, targetoptions, _CalleeCompiler)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Numba would compile the function again for each literal integer. LLVM propagates constants after inlining.
        integers = [types.unliteral(x) if isinstance(x, types.IntegerLiteral) else x for x in args]
        return super().get_call_template(integers, kws)

    def add_overload(self, result: Any) -> None:
        # The key under which callers find the function.
        entry = functools.partial(self._compile_for_args)
        self.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=entry)

    def _compile_for_args(self, *args: Any, **named: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} has no machine code: only compiled functions can call it")


def inline(function: Function) -> Function:
    """Decorator: Numba compiles the function into its callers, on a CPU or a GPU."""
    compiled: Function = _Callee(function, targetoptions={"nopython": True, "forceinline": True})
    return compiled


def jit(function: Callable[..., Any]) -> Any:
    """Decorator: ``numba.njit(forceinline=True)``, but compiles also where NUMBA_DISABLE_JIT is set."""
    return _Dispatcher(function, {}, {"nopython": True, "forceinline": True})


def callee(function: Callable[..., Any], name: str) -> Any:
    """`function`, for kernels on a CPU to call. Each kernel contains a copy. See `compile_cached` for the name."""
    return _Callee(_named(function, name), targetoptions={"nopython": True, "_nrt": False})


def compile_cached(
    signature: Any, function: Callable[..., Any], name: str, digest: str, *, allocates: bool = False
) -> CompileResult:
    """Compile `function` for `signature`, once per machine.

    Another function, or another value in its closure, needs another `name`. `digest` is that of all sources that the
    kernel is compiled from; if it is empty, the kernel is not cached. With `allocates`, the function may allocate or
    return arrays. Numba then counts references to all arrays: each view changes a number that all threads of a kernel
    share.

    The result's `entry_point` does not check the types of its arguments, since Numba's dispatcher, which does, costs a
    third of a small call. Pass only checked arrays: the kernel would misread an array of another type or dimension.
    BackendUnavailableError if the working directory was deleted, since Numba cannot compile without one.
    """

    def compile_now() -> CompileResult:
        options = {"nopython": True, "nogil": True, "_nrt": allocates, "no_cfunc_wrapper": True}
        dispatcher = CPUDispatcher(_named(function, name), {}, options, _KernelCompiler)
        try:
            dispatcher.compile(signature)
        except FileNotFoundError:
            raise BackendUnavailableError(
                "backend: Numba cannot compile a kernel, since the working directory of this process was deleted:"
                " change to one that exists by os.chdir"
            ) from None
        return dispatcher.overloads[signature.args]

    target = cpu_target.target_context
    with _compiling():
        rtsys.initialize(target)  # A cached kernel needs no more of `refresh`, which imports a third of Numba.
        dependencies = str(signature), *map(str, target.codegen().magic_tuple()), *versions()
        return cache.KernelFiles(FOLDER, "cpu", digest).load_or_compile(
            name, dependencies, compile_now, lambda kernel: dumps(kernel._reduce()),
            lambda payload: CompileResult._rebuild(target, *pickle.loads(payload)),
        )  # fmt: skip


# CPython keeps the frames of calls in blocks of 16 KiB. A call that finds the block full maps another block, and unmaps
# that block when the call returns. This takes 7 us each time, up to a fifth of a first draw. The large stack that
# `compile_cached` claims here makes CPython map a block that has room for all calls below.
compile_cached.__code__ = compile_cached.__code__.replace(co_stacksize=1 << 15)


def address_of(result: CompileResult) -> int:
    """The address of a function in Numba's calling convention, valid as long as the result is alive."""
    address: int = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    return address


def _named(function: Any, name: str) -> Any:
    # LLVM links by name. Numba's names are unique in one process only, so a kernel for the cache gets a fixed name.
    named = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    named.__qualname__ = name
    return named


def versions() -> list[str]:
    """Versions and settings of Numba on which machine code depends."""
    settings = [repr(getattr(config, name, None)) for name in _SETTINGS]
    return [*settings, numba.__version__, llvmlite.__version__, sys.version]


def source_digest() -> str:
    """The digest of the sources of all backends: see `Sources.digest`."""
    return sources.BACKENDS.digest()
