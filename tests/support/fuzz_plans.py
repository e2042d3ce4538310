"""Random calls of `sample`, each with the plans of earlier calls and again without plans: no bit may differ.

``python tests/support/fuzz_plans.py 100000 --seed 1 --device cpu`` stops at the first difference, and prints how to
repeat that call.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import random
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import draws
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import multisample
from multisample import Generator, Key, _plan, sample
from multisample._randomness.generator import DEFAULT_GENERATOR
from multisample._routes import recorded

Recipe = dict[str, Any]
Outcome = dict[str, Any]

CACHES = _plan.PLANS, recorded._GRADIENT_PLANS
FLOATS = "float16", "bfloat16", "float32", "float64"
ELEMENTS = *FLOATS, "float32", "float32", "int8", "uint8", "int32", "int64"
TORCH_LIBRARIES = "torch", "torch_cuda"


class DifferenceError(AssertionError):
    """A call with a plan and the same call without one differ."""


class PlainSubclass(torch.Tensor):
    """A tensor subclass that overrides nothing."""


class ArraySubclass(np.ndarray):
    """An array subclass that overrides nothing."""


class GeneratorSubclass(Generator):
    """A generator subclass that overrides nothing."""


class Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Index:
    """An object whose index can change, so that no plan may depend on it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


# --- Recipes: plain values, from which equal arguments can be made twice ------------------------------------------


def new_recipe(rng: random.Random, libraries: list[str]) -> Recipe:
    library = rng.choice(libraries)
    recipe: Recipe = {
        "library": library,
        "d": rng.choice([0, 1, 1, 2, 3, 3, 5, 8, rng.randrange(41), rng.randrange(41), 300]),
        "n": rng.choice([0, 1, 2, 4, 7, 7, 16, rng.randrange(41), rng.randrange(41), 300]),
        "mu": vector_recipe(rng, library), "sigma": vector_recipe(rng, library),
        "out": rng.choice([None] * 6 + ["C", "C", "F", "step", "offset", "reversed"]),
        "backend": rng.choice(["auto"] * 10 + ["cpu"] * 3 + ["torch_ext"] * 3 + ["numba", "cupy"]),
        "noise": rng.choice(["independent", "independent", "shared"]),
        "dtype": rng.choice([None, None, None, *FLOATS]), "dtype_form": rng.choice(["name", "numpy", "type", "torch"]),
        "layout": rng.choice(["dn", "dn", "nd"]), "antithetic": rng.random() < 0.25,
        "fast_math": rng.random() < 0.15, "validate": rng.random() < 0.15, "numpy_flags": rng.random() < 0.05,
        "n_form": rng.choice(["int"] * 8 + ["int64", "int32", "Index", "tensor"]),
    }  # fmt: skip
    vary(recipe, rng)
    return recipe


def vector_recipe(rng: random.Random, library: str) -> Recipe:
    kinds = ["array"] * 10 + ["int", "float"]
    if library == "numpy":
        kinds += ["list", "tuple", "scalar", "swapped", "misaligned", "subclass", "readonly", "zero_strides", "masked"]
    elif library in TORCH_LIBRARIES:
        kinds += ["requires_grad"] * 5 + ["parameter", "negative", "subclass", "inference", "zero_strides"]
    return {
        "kind": rng.choice(kinds), "dtype": rng.choice(ELEMENTS),
        "shape": rng.choice(["d"] * 8 + ["d1", "d1", "0"]),
        "strides": rng.choice(["plain"] * 6 + ["step", "reversed", "offset"]),
    }  # fmt: skip


def vary(recipe: Recipe, rng: random.Random) -> None:
    """Change the values that a plan must not depend on, in place, and sometimes add one or two mistakes."""
    recipe["values"] = rng.randrange(2**32)
    recipe["source"] = rng.choice(
        ["none", "none", "seed", "seed", "seed", "int64", "Key", "own", "own", "subclass", "torch", "graph_safe"]
        if recipe["library"] in TORCH_LIBRARIES
        else ["none", "seed", "seed", "seed", "int64", "Key", "own", "own", "subclass", "graph_safe"]
    )
    if recipe["source"] == "graph_safe" and rng.random() < 0.8:
        recipe["source"] = "own"
    recipe["dim_offset"] = rng.choice([0, 0, 0, 1, 5, 2**32 - recipe["d"], rng.randrange(2**31)])
    recipe["sample_offset"] = rng.choice([0, 0, 0, 1, 3, 2**34 - recipe["n"], rng.randrange(2**33)])
    recipe["window_form"] = rng.choice(["int"] * 8 + ["int64"])
    recipe["mode"] = rng.choice(
        ["plain"] * 20 + [
            "no_grad", "no_grad", "inference", "autocast", "deterministic", "default_dtype", "default_device",
            "function_mode", "dispatch_mode", "vmap", "jvp", "grad", "vjp", "stream", "stream",
        ]
    )  # fmt: skip
    recipe["backward"] = rng.choice(["none", "C", "F", "expanded", "sum"])
    kinds = [*MISTAKES, *["overlap mu", "overlap sigma", "out read only", "n float"] * (3 if recipe["out"] else 1)]
    recipe["bad"] = [rng.choice(kinds) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    if rng.random() > 0.2:
        recipe["bad"] = []


# Mistakes change the options of a call in place. Some are valid for some calls.
def _values(name: str, value: float) -> Callable[[Recipe], None]:
    def change(call: Recipe) -> None:
        x = call[name]
        if isinstance(x, (int, float)):
            call[name] = value
        elif isinstance(x, (list, tuple)):
            call[name] = type(x)([*x[:-1], value])
        elif hasattr(x, "dtype") and "float" in str(x.dtype) and getattr(x, "size", 1):
            with torch.no_grad(), contextlib.suppress(Exception):
                x[-1 if x.ndim else ()] = value

    return change


def _set(name: str, value: Any) -> Callable[[Recipe], None]:
    return lambda call: call.update({name: value})


def _n_float(call: Recipe) -> None:
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # Another mistake may have changed `n`.
        call["n"] = float(int(call["n"]))


def _overlap(name: str) -> Callable[[Recipe], None]:
    def change(call: Recipe) -> None:
        out = call["out"]
        if out is not None and not isinstance(call[name], (int, float, list, tuple)):
            with contextlib.suppress(Exception):
                call[name] = out[0, :] if call["layout"] == "nd" else out[:, 0]

    return change


def _read_only(call: Recipe) -> None:
    if isinstance(call["out"], np.ndarray):
        call["out"].flags.writeable = False


def _out(change_out: Callable[[Any], Any]) -> Callable[[Recipe], None]:
    def change(call: Recipe) -> None:
        if call["out"] is not None:
            with contextlib.suppress(Exception):
                call["out"] = change_out(call["out"])

    return change


def _subclass(out: Any) -> Any:
    return out.view(ArraySubclass) if isinstance(out, np.ndarray) else out.as_subclass(PlainSubclass)


def _inference_tensor(out: Any) -> Any:
    with torch.inference_mode():
        return torch.zeros(out.shape, dtype=out.dtype, device=out.device)


def _freed(name: str) -> Callable[[Recipe], None]:
    def change(call: Recipe) -> None:
        if isinstance(call[name], torch.Tensor) and call[name].is_cpu:
            with torch.no_grad(), contextlib.suppress(Exception):
                call[name] = call[name].detach().clone()
                call[name].untyped_storage().resize_(0)

    return change


def _dead(call: Recipe) -> None:
    """A tensor of a transform that has ended."""
    if type(call["mu"]) is torch.Tensor and call["mu"].is_floating_point():
        kept: list[Any] = []
        with contextlib.suppress(Exception):
            torch.func.vmap(lambda x: kept.append(x) or x)(call["mu"].detach().expand(2, *call["mu"].shape))
            call["mu"] = kept[0]


MISTAKES: dict[str, Callable[[Recipe], None]] = {
    "negative sigma": _values("sigma", -1.0), "NaN sigma": _values("sigma", float("nan")),
    "infinite sigma": _values("sigma", float("inf")), "NaN mu": _values("mu", float("nan")),
    "infinite mu": _values("mu", float("-inf")), "huge mu": _values("mu", 1e300), "int mu": _set("mu", 10**400),
    "n bool": _set("n", True), "n float": _n_float,
    "n negative": _set("n", -1),
    "n large": _set("n", 2**34 + 1), "n None": _set("n", None), "n text": _set("n", "3"),
    "flag 0": _set("fast_math", 0), "flag 1": _set("antithetic", 1), "flag None": _set("validate", None),
    "noise": _set("noise", "none"), "noise type": _set("noise", b"shared"), "layout": _set("layout", "dd"),
    "layout type": _set("layout", ["dn"]), "backend": _set("backend", "none"), "backend type": _set("backend", 3),
    "dtype": _set("dtype", "int32"), "dtype number": _set("dtype", 1), "dtype scalar": _set("dtype", np.float32(1)),
    "dtype double scalar": _set("dtype", np.float64(1)), "dtype list": _set("dtype", []),
    "dim_offset bool": _set("dim_offset", True), "dim_offset float": _set("dim_offset", 0.0),
    "dim_offset negative": _set("dim_offset", -1), "dim_offset large": _set("dim_offset", 2**32),
    "sample_offset bool": _set("sample_offset", False), "sample_offset negative": _set("sample_offset", -1),
    "sample_offset large": _set("sample_offset", 2**34 + 1), "sample_offset None": _set("sample_offset", None),
    "seed negative": _set("seed", -1), "seed large": _set("seed", 2**64), "seed bool": _set("seed", True),
    "seed float": _set("seed", 1.0), "Key": _set("seed", Key(-1, 0)), "Key offset": _set("seed", Key(0, 2**64)),
    "Key type": _set("seed", Key(1.0, True)), "generator": _set("generator", 3),  # type: ignore[arg-type]
    "NumPy generator": _set("generator", np.random.default_rng(1)),
    "PyTorch generator": lambda call: call.update(generator=torch.Generator().manual_seed(1), seed=None),
    "overlap mu": _overlap("mu"), "overlap sigma": _overlap("sigma"), "out read only": _read_only,
    "out subclass": _out(_subclass),
    "out masked": _out(np.ma.masked_array), "out matrix": _out(lambda out: out.view(np.matrix)),
    "out list": _out(lambda out: out.tolist()), "out transposed": _out(lambda out: out.T),
    "out row": _out(lambda out: out[:1]),
    "out expanded": _out(lambda out: out[:1].expand(out.shape)), "out inference": _out(_inference_tensor),
    "out swapped": _out(lambda out: out.astype(out.dtype.newbyteorder())),
    "out dtype": _out(lambda out: out.astype("int32")),
    "out requires grad": _out(lambda out: out.requires_grad_()), "out negative": _out(lambda out: torch._neg_view(out)),
    "mu matrix": lambda call: call.update(mu=np.matrix([[1.0]])), "mu text": _set("mu", "a"),
    "mu None": _set("mu", None),
    "mu bool": _set("mu", True), "sigma complex": _set("sigma", np.ones(3, np.complex64)),
    "sigma objects": _set("sigma", np.array([1, None])), "sigma list": _set("sigma", [1.0, 2.0]),
    "meta": lambda call: call.update(mu=torch.zeros(3, device="meta")),
    "sparse": lambda call: call.update(mu=torch.ones(3).to_sparse()),
    "foreign mu": lambda call: call.update(mu=np.zeros(3)),
    "foreign sigma": lambda call: call.update(sigma=torch.ones(3)),
    "freed mu": _freed("mu"), "freed out": _freed("out"), "dead": _dead,
}  # fmt: skip


# --- Arguments of a recipe -------------------------------------------------------------------------------------------


def numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def host_values(rng: np.random.Generator, d: int, dtype: str) -> Any:
    return rng.integers(0, 9, d).astype(dtype) if "int" in dtype else rng.random(d).astype(numpy_dtype(dtype))


def on_device(library: str, host: Any) -> Any:
    """A NumPy array as a plain array of `library`."""
    if library == "numpy":
        return host.copy()
    if library in TORCH_LIBRARIES:
        device = "cuda" if library == "torch_cuda" else "cpu"
        if host.dtype.name == "bfloat16":
            return torch.from_numpy(host.view(np.int16).copy()).view(torch.bfloat16).to(device)
        return torch.from_numpy(host.copy()).to(device)
    if library == "cupy":
        import cupy

        return cupy.asarray(host)
    from numba import cuda

    return cuda.to_device(host)


def make_vector(library: str, kind: Recipe, d: int, rng: np.random.Generator) -> Any:
    if kind["kind"] == "int":
        return int(rng.integers(0, 5))
    if kind["kind"] == "float":
        return float(rng.random())
    dtype = kind["dtype"]
    if library == "numba" and dtype == "bfloat16":
        dtype = "float32"
    length = {"d": d, "d1": d, "0": 1}[kind["shape"]]
    values = host_values(rng, 2 * length + 1, dtype)
    if kind["kind"] in ("list", "tuple"):
        return (list if kind["kind"] == "list" else tuple)(values[:length].astype(float).tolist())
    if kind["kind"] == "scalar":
        return values[0]
    if kind["kind"] == "misaligned" and values.dtype.itemsize > 1:
        values = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:].view(values.dtype)
    base = on_device(library, values) if library != "numpy" else values
    forms = {"plain": slice(0, length), "step": slice(0, 2 * length, 2), "offset": slice(1, length + 1)}
    form = kind["strides"] if library != "numba" else "plain"
    if form == "reversed":
        x = base[:length][::-1] if library in ("numpy", "cupy") else base[:length]
    else:
        x = base[forms[form]]
    if kind["shape"] == "d1" and library != "numba":
        x = x[:, None]
    elif kind["shape"] == "0" and library != "numba":
        x = x.reshape(())
    return special(kind["kind"], x)


def special(kind: str, x: Any) -> Any:
    """A special array, with the shape and type of `x`."""
    if kind == "swapped":
        return x.astype(x.dtype.newbyteorder()) if x.dtype.name != "bfloat16" else x
    if kind == "readonly":
        x.flags.writeable = False
    elif kind == "masked":
        return np.ma.masked_array(x)
    elif kind == "zero_strides" and x.shape and x.shape[0]:
        return np.broadcast_to(x[:1], x.shape) if isinstance(x, np.ndarray) else x[:1].expand(x.shape)
    elif kind == "subclass":
        return x.view(ArraySubclass) if isinstance(x, np.ndarray) else x.as_subclass(PlainSubclass)
    elif kind == "inference":
        with torch.inference_mode():
            return x.clone()
    elif kind == "negative":
        return torch._neg_view(-x) if x.dtype.is_signed else x
    elif kind in ("requires_grad", "parameter") and x.is_floating_point():
        return torch.nn.Parameter(x.detach()) if kind == "parameter" else x.detach().requires_grad_()
    return x


def make_out(recipe: Recipe, dtype: str) -> tuple[Any, Any]:
    """`out`, and the array that owns its memory."""
    library, shape = recipe["library"], (recipe["d"], recipe["n"])
    if recipe["layout"] == "nd":
        shape = shape[::-1]
    rows, columns = shape
    sizes = {"F": (columns, rows), "step": (2 * rows, 2 * columns + 1), "offset": (rows + 1, columns + 3)}
    form = recipe["out"]
    if library == "numba" or (form == "reversed" and library not in ("numpy", "cupy")):
        form = "C"
    if library == "numba" and dtype == "bfloat16":
        dtype = "float16"  # numba-cuda cannot copy bfloat16 to a device.
    base = on_device(library, np.full(sizes.get(form, shape), 77).astype(numpy_dtype(dtype)))
    views: dict[str, Callable[[Any], Any]] = {
        "C": lambda x: x, "F": lambda x: x.T, "step": lambda x: x[::2, 1::2], "offset": lambda x: x[1:, 3:],
        "reversed": lambda x: x[::-1, ::-1],
    }  # fmt: skip
    return views[form](base), base


def make_call(recipe: Recipe) -> tuple[Recipe, Outcome]:
    """New arguments of `sample`, and the objects whose state is compared."""
    rng = np.random.default_rng(recipe["values"])
    library = recipe["library"]
    mu, sigma = (make_vector(library, recipe[name], recipe["d"], rng) for name in ("mu", "sigma"))
    dtype = recipe["dtype"]
    call = {name: recipe[name] for name in ("noise", "layout", "antithetic", "fast_math", "validate", "backend")}
    if recipe["numpy_flags"]:
        call |= {name: np.bool_(call[name]) for name in ("antithetic", "fast_math", "validate")}
    forms: dict[str, Callable[[str], Any]] = {
        "name": str, "numpy": numpy_dtype, "type": lambda name: numpy_dtype(name).type,
        "torch": lambda name: getattr(torch, name),
    }  # fmt: skip
    call |= {"mu": mu, "sigma": sigma, "dtype": None if dtype is None else forms[recipe["dtype_form"]](dtype)}
    make_n = {"int": int, "int64": np.int64, "int32": np.int32, "Index": Index, "tensor": torch.tensor}
    call["n"] = make_n[recipe["n_form"]](recipe["n"])
    make_offset = {"int": int, "int64": np.int64}[recipe["window_form"]]
    call |= {name: make_offset(recipe[name]) for name in ("dim_offset", "sample_offset")}
    source, number = recipe["source"], int(rng.integers(0, 2**62))
    seeds = {"seed": number, "int64": np.int64(number), "Key": Key(number, number // 3)}
    generators: dict[str, Callable[[int], Any]] = {
        "own": Generator,
        "subclass": GeneratorSubclass,
        "graph_safe": lambda seed: Generator(seed, graph_safe=True),
        "torch": lambda seed: torch.Generator("cuda" if library == "torch_cuda" else "cpu").manual_seed(seed),
    }
    call |= {"seed": seeds.get(source), "generator": generators[source](number) if source in generators else None}
    call["out"], memory = None, None
    if recipe["out"] is not None:
        counted = [kind["dtype"] for kind in (recipe["mu"], recipe["sigma"]) if kind["kind"] not in ("int", "float")]
        counted = [name if name in FLOATS else "float32" for name in counted] or ["float32"]
        common = counted[0] if len(set(counted)) == 1 else "float64" if "float64" in counted else "float32"
        call["out"], memory = make_out(recipe, dtype or common)
    kept = {"generator": call["generator"], "memory": memory, "mu": mu, "sigma": sigma}
    mistakes = recipe["bad"]
    lost = [mistake for mistake in mistakes if mistake in ("freed mu", "freed out", "dead")]
    if (
        lost
    ):  # Only one mistake, since errors may be found in another order. None in operators, which read freed memory.
        mistakes = [] if recipe["mode"] in ("dispatch_mode", "vmap", "jvp", "grad", "vjp") else lost[:1]
    for mistake in mistakes:
        MISTAKES[mistake](call)
    return call, kept


# --- Calls -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_mode(mode: str, library: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "autocast":
            stack.enter_context(torch.autocast("cuda" if "cuda" in library else "cpu", torch.bfloat16))
        elif mode == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        elif mode == "default_dtype":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, before)
        elif mode == "default_device":
            stack.enter_context(torch.device("meta"))
        elif mode == "function_mode":
            stack.enter_context(Passing())
        elif mode == "dispatch_mode":
            stack.enter_context(Dispatching())
        elif mode == "stream" and library == "torch_cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
            stack.callback(torch.cuda.synchronize)
        elif mode == "stream" and library == "cupy":
            import cupy

            cupy.cuda.Device().synchronize()
            stack.enter_context(cupy.cuda.Stream())
            stack.callback(cupy.cuda.Device().synchronize)
        yield


def draw(call: Recipe, mode: str) -> Any:
    if mode not in ("vmap", "jvp", "grad", "vjp") or not isinstance(call["mu"], torch.Tensor):
        return sample(**call)
    mu, rest = call["mu"], {name: value for name, value in call.items() if name != "mu"}

    def function(mu: Any) -> Any:
        return sample(mu, **rest)

    if mode == "vmap":
        return torch.func.vmap(function, randomness="different")(mu.detach().expand(2, *mu.shape))
    if mode == "jvp":
        return torch.func.jvp(function, (mu.detach(),), (torch.ones_like(mu),))[1]
    if mode == "vjp":
        return torch.func.vjp(function, mu.detach())[0]
    return torch.func.grad(lambda mu: function(mu).double().sum())(mu.detach())


def draw_recorded(call: Recipe, recipe: Recipe) -> tuple[Any, list[Any]]:
    """The result, and its gradients if they are recorded."""
    result = draw(call, recipe["mode"])
    if not (isinstance(result, torch.Tensor) and result.requires_grad) or recipe["backward"] == "none":
        return result, []
    shape = result.shape
    if recipe["backward"] == "sum":
        grad = None
    elif recipe["backward"] == "expanded":
        grad = torch.ones((), dtype=result.dtype, device=result.device).expand(shape)
    else:
        sizes = shape if recipe["backward"] == "C" else shape[::-1]
        count = torch.arange(result.numel(), device=result.device).reshape(sizes) % 7
        grad = (count if recipe["backward"] == "C" else count.T).to(result.dtype)
    (result.sum() if grad is None else result).backward(grad)
    return result, [getattr(call[name], "grad", None) for name in ("mu", "sigma")]


def contents(array: Any) -> Any:
    """Bits, shape and type of an array, or the value of another object."""
    if isinstance(array, torch.Tensor):
        plain = array.detach().resolve_neg().contiguous().cpu()
        whole = plain.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8).numpy().tobytes()
        return (
            type(array), array.dtype, tuple(array.shape), array.stride(), str(array.device), array.requires_grad,
            array.is_inference(), whole,
        )  # fmt: skip
    if isinstance(array, np.ndarray):
        return type(array), array.dtype, array.shape, array.strides, array.flags.writeable, array.tobytes()
    if hasattr(array, "__cuda_array_interface__"):
        host = array.get() if hasattr(array, "get") else array.copy_to_host()
        return type(array), array.dtype, array.shape, array.strides, host.tobytes()
    return repr(array)


def state_of(generator: Any) -> Any:
    if isinstance(generator, Generator):
        return None if generator.graph_safe else tuple(generator.state.items())
    return generator.get_state().numpy().tobytes() if isinstance(generator, torch.Generator) else repr(generator)


def chain(error: BaseException) -> list[Any]:
    """An error and its causes as Python shows them, without addresses."""
    shown = []
    one: BaseException | None = error
    while one is not None:
        shown.append((type(one), re.sub("0x[0-9a-fA-F]+", "0x", str(one))))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return shown


def run(recipe: Recipe, alone: bool = True) -> Outcome:
    """Run one call with new arguments. With `alone`, the outcome includes the process-wide generators."""
    if alone:
        torch.manual_seed(recipe["values"] % 97)
        multisample.manual_seed(recipe["values"] % 89)
    call, kept = make_call(recipe)
    found: Outcome = {}
    try:
        with in_mode(recipe["mode"], recipe["library"]):
            result, gradients = draw_recorded(call, recipe)
        found["result is out"] = call["out"] is not None and result is call["out"]
        found["result"], found["gradients"] = contents(result), [contents(x) for x in gradients]
    except Exception as error:
        found["error"] = chain(error)
        error.__traceback__ = None
    with contextlib.suppress(Exception):  # The memory may be freed.
        found |= {name: contents(kept[name]) for name in ("memory", "mu", "sigma")}
    found["generator"] = state_of(kept["generator"])
    if alone:
        found["defaults"] = state_of(DEFAULT_GENERATOR), state_of(torch.default_generator)
        if recipe["library"] == "torch_cuda":
            found["cuda"] = state_of(torch.cuda.default_generators[0])
    return found


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """Disable plans and builtins inside the block; restore them on exit."""
    plans = [dict(cache._plans) for cache in CACHES]
    with draws.without_builtins():
        yield
    for cache, before in zip(CACHES, plans, strict=True):
        cache.clear()
        cache._plans.update(before)  # type: ignore[attr-defined]


def compare(planned: Outcome, fresh: Outcome, recipe: Recipe, where: str) -> None:
    names = [name for name in {**planned, **fresh} if planned.get(name) != fresh.get(name)]
    if names:
        lines = [f"{name}: {str(planned.get(name))[:600]}\n  fresh: {str(fresh.get(name))[:600]}" for name in names]
        raise DifferenceError(f"{where}\n{recipe}\n" + "\n".join(lines))


class Fuzzer:
    """A run of `count` calls from `seed`; `counts` has the number of calls of each kind."""

    def __init__(self, count: int, seed: int, device: str) -> None:
        self.count, self.seed = count, seed
        self.counts: collections.Counter[str] = collections.Counter()
        self._libraries = ["numpy", "torch", "torch"]
        if device == "cuda":
            self._libraries += ["torch_cuda", "torch_cuda", "cupy", "numba"]
        self._recent: collections.deque[Recipe] = collections.deque(maxlen=60)
        self._is_fresh = False

    def _recipe(self, rng: random.Random) -> Recipe:
        if not self._recent or rng.random() < 0.08:
            return new_recipe(rng, self._libraries) | {"is_new": True}
        recipe = dict(rng.choice(self._recent))
        vary(recipe, rng)
        if rng.random() < 0.1:  # Change one property of an earlier recipe.
            name = rng.choice(["mu", "sigma"])
            recipe[name] = {**recipe[name], **{"kind": vector_recipe(rng, recipe["library"])["kind"]}}
        if rng.random() < 0.05:
            recipe["n_form"] = rng.choice(["int", "int64", "Index", "tensor"])
        return recipe

    def _count(self, recipe: Recipe, found: Outcome) -> None:
        self.counts["errors" if "error" in found else "results"] += 1
        self.counts[f"library {recipe['library']}"] += 1
        self.counts[f"mode {recipe['mode']}"] += 1
        self.counts[f"source {recipe['source']}"] += 1
        self.counts["gradients"] += bool(found.get("gradients"))
        self.counts["with out"] += recipe["out"] is not None
        self.counts["with mistakes"] += bool(recipe["bad"])
        if "error" not in found and recipe.pop("is_new", False):
            self._recent.append(recipe)

    def _fresh(self, recipe: Recipe, alone: bool = True) -> Outcome:
        with without_plans():
            self._is_fresh = True
            try:
                return run(recipe, alone)
            finally:
                self._is_fresh = False

    def _one(self, rng: random.Random, where: str) -> None:
        recipe = self._recipe(rng)
        if rng.random() < 0.5:
            planned = run(recipe)
            fresh = self._fresh(recipe)
        else:
            fresh = self._fresh(recipe)
            planned = run(recipe)
        self._count(recipe, planned)
        compare(planned, fresh, recipe, where)

    def _many(self, rng: random.Random, where: str) -> int:
        """Calls on 8 threads at once."""
        recipes = []
        for _ in range(24):
            recipe = self._recipe(rng)
            recipe = {**recipe, "source": rng.choice(["seed", "Key", "own"])}
            # Other modes affect the whole process.
            recipe["mode"] = rng.choice(["plain", "plain", "no_grad", "inference"])
            recipes.append(recipe)
        found: list[Outcome] = [{} for _ in recipes]
        errors: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for place in range(first, len(recipes), 8):
                    found[place] = run(recipes[place], alone=False)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for recipe, planned in zip(recipes, found, strict=True):
            fresh = self._fresh(recipe, alone=False)
            self._count(recipe, planned)
            compare(planned, fresh, recipe, f"{where}, on several threads")
        self.counts["on threads"] += len(recipes)
        return len(recipes)

    def _watched(self, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(key: Any) -> Any:
            plan = get(key)
            if not self._is_fresh:
                self.counts["misses" if plan is None else "hits"] += 1
            return plan

        return watched

    def run(self) -> None:
        """Run all calls; a `DifferenceError` describes how to repeat the differing call."""
        rng, done = random.Random(self.seed), 0
        before = _plan.PLANS.get
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            _plan.PLANS.get = self._watched(before)
            stack.callback(setattr, _plan.PLANS, "get", before)
            while done < self.count:
                where = f"call {done} of {self.count} --seed {self.seed}"
                if rng.random() < 0.004:
                    done += self._many(rng, where)
                else:
                    self._one(rng, where)
                    done += 1
                    if done % 10000 == 0:
                        print(f"{done} calls", flush=True)
        self.counts["calls"] = done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    faulthandler.enable()
    fuzzer = Fuzzer(arguments.count, arguments.seed, arguments.device)
    begin = time.monotonic()
    try:
        fuzzer.run()
    except DifferenceError as difference:
        print(f"A call with a plan and the same call without one differ: {difference}")
        return 1
    finally:
        for name, count in sorted(fuzzer.counts.items()):
            print(f"{name:24} {count}")
        print(f"{time.monotonic() - begin:.1f} s, {len(_plan.PLANS)} plans")
    return 0


if __name__ == "__main__":
    sys.exit(main())
