"""Run the PTX of one kernel on the CPU: all threads in step, one NumPy operation for each instruction.

The machine implements only the instructions of the stream's code; any other is an error. These are errors too:
approximations except `rsqrt.approx`, roundings except to nearest, and subnormal operands of instructions that flush
them. So are fusible products: products without ``.rn`` whose results feed an addition without ``.rn``. The C library
computes fused multiply-adds exactly. `rsqrt.approx` gives the nearest float32 or a neighbour; the stream corrects it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Machine", "filled", "statements_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_BASE = 1 << 20
_SIZES = {"pred": 1, **{kind + str(8 * size): size for kind in "bufs" for size in (1, 2, 4, 8)}}
_LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
_LIBM.fmaf.restype, _LIBM.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_LIBM.fma.restype, _LIBM.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def _fma(a: Array, b: Array, c: Array) -> Array:
    function = _LIBM.fmaf if a.dtype == np.float32 else _LIBM.fma
    rows = zip(*(x.tolist() for x in np.broadcast_arrays(a, b, c)), strict=True)
    return np.array([function(*row) for row in rows], a.dtype)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum, "shl": np.left_shift, "shr": np.right_shift,
    "rem": np.remainder, "div": np.floor_divide,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _dtype(kind: str) -> Any:
    """NumPy's type for the last part of an opcode, such as u32; bits count as unsigned."""
    return np.dtype(f"{ {'b': 'u', 'u': 'u', 's': 'i', 'f': 'f'}[kind[0]] }{int(kind[1:]) // 8}")


def filled(ptx: str, z: Array, *arguments: Any, threads: int = 0, block: int | None = None) -> Array:
    """Run a kernel on these arguments and `z`; return the new `z`. Arrays are passed by address, structs as bytes.

    `ptx` has the parameters and the body. The grid has a thread for each element of `z`, in one block, by default.
    """
    machine = Machine(threads or z.size, block)
    at = machine.array(z)
    machine.run(ptx, *(machine.array(x) if isinstance(x, np.ndarray) else x for x in arguments), at)
    return machine.read(at)


class Machine:
    """Global memory, and the threads of one launch."""

    def __init__(self, threads: int, block: int | None = None, *, contraction: bool = False) -> None:
        """With `contraction`, fusible products are no error; they are still computed unfused."""
        self.threads, self.block, self._contraction = threads, block or threads, contraction
        self._memory = bytearray()
        self._sizes: dict[int, tuple[Any, tuple[int, ...]]] = {}

    def array(self, values: Array) -> np.uint64:
        """The address of a copy of `values`."""
        self._memory += b"\xff" * (-len(self._memory) % 256)
        address = _BASE + len(self._memory)
        self._sizes[address] = values.dtype, values.shape
        self._memory += np.ascontiguousarray(values).tobytes()
        return np.uint64(address)

    def read(self, address: np.uint64) -> Array:
        """The array at an address that `array` has returned."""
        dtype, shape = self._sizes[int(address)]
        start = int(address) - _BASE
        count = int(np.prod(shape))
        return np.frombuffer(bytes(self._memory[start : start + dtype.itemsize * count]), dtype).reshape(shape)

    def run(self, ptx: str, *arguments: Any) -> None:
        """Run the kernel whose parameters and body are `ptx`; arguments are NumPy scalars, or bytes of a struct."""
        head, body = ptx.split("{", 1)
        head = re.sub(r"//.*", "", head)
        names = re.findall(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+(?:\s+\.ptr\b[^,)]*?)?\s+(\w+)(?:\[\d+\])?\s*[,)]", head + ")"
        )
        # Compilers may add parameters, such as Triton's scratch memory.
        assert len(names) >= len(arguments), (names, len(arguments))
        self._parameters = {
            name: (argument if isinstance(argument, bytes) else np.asarray(argument).tobytes()).ljust(16, b"\0")
            for name, argument in zip(names, [*arguments, *[np.uint64(0)] * len(names)], strict=False)
        }
        self._registers: dict[str, Array] = {}
        self._loose: set[str] = set()
        # A load outside of the arrays fails, so no uninitialised byte is ever read.
        self._bytes = np.frombuffer(self._memory, np.uint8)
        statements, labels = statements_of(body)
        at = 0
        for _ in range(100_000):
            guard, opcode, operands = statements[at]
            at += 1
            active = np.ones(self.threads, bool)
            if guard:
                flag = self._registers[guard.lstrip("!")]
                active = ~flag if guard[0] == "!" else flag
            name = opcode.split(".")[0]
            if name in ("bra", "ret", "exit"):
                assert active.all() or not active.any(), "threads diverge"
                if active.all():
                    if name != "bra":
                        return
                    at = labels[operands[0]]
                continue
            if active.any():
                self._execute(opcode, operands, active)
        raise AssertionError("the kernel does not end")

    # --- Operands ---------------------------------------------------------------------------------

    def _value(self, text: str, dtype: Any) -> Array:
        size = dtype.itemsize
        if text.startswith("%"):
            thread = np.arange(self.threads)
            special = {
                "%tid.x": thread % self.block, "%ctaid.x": thread // self.block, "%ntid.x": 0 * thread + self.block,
                "%nctaid.x": 0 * thread + self.threads // self.block,
            }  # fmt: skip
            if text in special:
                return special[text].astype(dtype)
            found = self._registers[text]
            if found.dtype == bool:
                return found
            # Shorter operands are the lower bits of a register.
            return np.ascontiguousarray(found).view(f"u{found.itemsize}").astype(f"u{size}").view(dtype)
        if constant := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})|0[dD]([0-9A-Fa-f]{16})", text):
            bits = int(constant[1] or constant[2], 16)
            return np.full(self.threads, bits, f"u{size}").view(dtype)
        return np.full(self.threads, int(text, 0) % 2 ** (8 * size), f"u{size}").view(dtype)

    def _set(self, register: str, value: Array, active: Array) -> None:
        if register == "_":
            return
        if not active.all():
            old = self._registers.get(register)
            if old is not None:
                value = np.where(active, value.view(old.dtype) if old.dtype != bool else value, old)
        self._registers[register] = value if value.dtype == bool else np.ascontiguousarray(value)

    def _addresses(self, text: str) -> Array:
        match = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        assert match, text
        return self._value(match[1], np.dtype("u8")) + np.uint64(int(match[2] or 0) % 2**64)

    # --- Instructions -----------------------------------------------------------------------------

    def _execute(self, opcode: str, operands: list[str], active: Array) -> None:
        name, *parts = opcode.split(".")
        kind = parts[-1] if parts else ""
        target = operands[0]
        if name == "ld" and parts[0] == "param":
            return self._load_parameter(opcode, operands, active)
        if name in ("ld", "st"):
            return self._access(name, opcode, operands, active)
        if name == "shfl":
            return self._exchange(parts, operands, active)
        if name == "mov" and "{" in "".join(operands):
            return self._pack(kind, operands, active)
        if kind in ("f32", "f64") and "rn" not in parts and not self._contraction:
            if name in ("add", "sub", "fma"):
                assert not self._loose.intersection(operands[1:]), f"{opcode} may be contracted"
            if name == "mul" or (name in ("mov", "neg", "selp") and self._loose.intersection(operands[1:])):
                self._loose.add(target)
        with np.errstate(over="ignore", invalid="ignore"):
            self._set(target, self._result(name, parts, kind, operands[1:]), active)
        return None

    def _result(self, name: str, parts: list[str], kind: str, sources: list[str]) -> Array:
        if name == "cvta":
            return self._value(sources[0], np.dtype("u8"))
        if kind == "pred":
            values = [self._value(source, np.dtype(bool)) for source in sources]
            return ~values[0] if name == "not" else _BINARY[name](*values)
        dtype = _dtype(kind)
        if name == "cvt":
            value = self._value(sources[0], dtype)
            to = _dtype(parts[-2])
            assert to.kind != "f" or "rn" in parts or to.itemsize > dtype.itemsize, parts
            return value.astype(to)
        if name == "selp":
            flag = self._registers[sources[2]]
            return np.where(flag, self._value(sources[0], dtype), self._value(sources[1], dtype))
        if name == "bfi":
            a, b, start, length = (self._value(s, np.dtype("u8")) for s in sources)
            mask = ((np.uint64(1) << length) - np.uint64(1)) << start
            return ((b & ~mask) | ((a << start) & mask)).astype(dtype)
        if name in ("shl", "shr"):
            value, by = self._value(sources[0], dtype), self._value(sources[1], np.dtype("u4"))
            assert (by < 8 * dtype.itemsize).all()
            return _BINARY[name](value, by.astype(dtype))
        if name == "prmt":
            return self._permuted(sources)
        values = [self._value(source, dtype) for source in sources]
        if name == "setp":
            return _COMPARISONS[parts[0]](*values)
        if name == "mov":
            return values[0]
        if name == "neg":
            return -values[0] if dtype.kind == "f" else (np.zeros_like(values[0]) - values[0])
        if name == "not":
            return ~values[0]
        if name == "shf":
            low, high, by = values
            assert parts[:2] == ["l", "wrap"]
            joined = high.astype("u8") << np.uint64(32) | low
            return (joined << (by % 32).astype("u8") >> np.uint64(32)).astype("u4")
        if dtype.kind == "f":
            assert not {"rz", "rm", "rp"}.intersection(parts) and ("approx" in parts) == (name == "rsqrt"), parts
            if "ftz" in parts:
                assert not any(((x != 0) & (abs(x) < np.finfo(dtype).tiny)).any() for x in values), "flushes to zero"
            if name == "fma":
                return _fma(*values)
            if name == "rsqrt":
                nearest = (1 / np.sqrt(values[0].astype("f8"))).astype("f4").view("u4")
                return (nearest + values[0].view("u4") % 3 - np.uint32(1)).view("f4")
            return np.sqrt(values[0]) if name == "sqrt" else _BINARY[name](*values)
        if name in ("mul", "mad"):
            a, b = values[:2]
            if "wide" in parts or "hi" in parts:
                assert dtype.itemsize == 4, parts
                wide = np.dtype(f"{dtype.kind}8")
                product = a.astype(wide) * b.astype(wide)
                result = product if "wide" in parts else (product >> wide.type(32)).astype(dtype)
            else:
                result = a * b
            return result if name == "mul" else result + self._value(sources[2], result.dtype)
        return _BINARY[name](*values)

    def _permuted(self, sources: list[str]) -> Array:
        a, b, selector = (self._value(source, np.dtype("u4")).astype("u8") for source in sources)
        joined, result = b << np.uint64(32) | a, np.zeros(self.threads, "u8")
        for k in range(4):
            chosen = selector >> np.uint64(4 * k) & np.uint64(7)
            result |= (joined >> (np.uint64(8) * chosen) & np.uint64(255)) << np.uint64(8 * k)
        return result.astype("u4")

    def _exchange(self, parts: list[str], operands: list[str], active: Array) -> None:
        assert parts == ["sync", "bfly", "b32"] and active.all()
        value, mask = (self._value(text, np.dtype("u4")) for text in operands[1:3])
        self._set(operands[0].partition("|")[0], value[np.arange(self.threads) ^ mask], active)

    def _pack(self, kind: str, operands: list[str], active: Array) -> None:
        dtype = _dtype(kind)
        half = np.dtype(f"u{dtype.itemsize // 2}")
        if "{" in operands[0]:
            value = self._value(operands[1], dtype).view(f"u{dtype.itemsize}")
            for k, register in enumerate(_listed(operands[0])):
                self._set(register, (value >> value.dtype.type(4 * k * dtype.itemsize)).astype(half), active)
            return
        low, high = (self._value(register, half).astype(f"u{dtype.itemsize}") for register in _listed(operands[1]))
        self._set(operands[0], low | high << low.dtype.type(4 * dtype.itemsize), active)

    def _load_parameter(self, opcode: str, operands: list[str], active: Array) -> None:
        match = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", operands[1])
        assert match, operands
        dtype, start = _dtype(opcode.split(".")[-1]), int(match[2] or 0)
        for k, register in enumerate(_listed(operands[0])):
            content = self._parameters[match[1]][start + k * dtype.itemsize :][: dtype.itemsize]
            self._set(register, np.full(self.threads, np.frombuffer(content, dtype)[0]), active)

    def _access(self, name: str, opcode: str, operands: list[str], active: Array) -> None:
        assert ".global" in opcode, opcode
        dtype = _dtype(opcode.split(".")[-1])
        at, registers = (operands[1], operands[0]) if name == "ld" else (operands[0], operands[1])
        first = self._addresses(at) - np.uint64(_BASE)
        for k, register in enumerate(_listed(registers)):
            places = (first + np.uint64(k * dtype.itemsize))[:, None] + np.arange(dtype.itemsize, dtype="u8")
            places = places[active]
            assert (places < len(self._memory)).all(), f"{opcode} outside of the arrays"
            if name == "ld":
                value = np.zeros(self.threads, dtype)
                value[active] = np.ascontiguousarray(self._bytes[places]).view(dtype)[:, 0]
                self._set(register, value, active)
            else:
                value = self._value(register, dtype)[active]
                self._bytes[places] = np.ascontiguousarray(value).view("u1").reshape(-1, dtype.itemsize)


def _listed(text: str) -> list[str]:
    """The registers of a vector ``{a, b}``, or of a scalar."""
    return [part.strip() for part in text.strip("{} ").split(",")]


_STATEMENT = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.S)


def statements_of(body: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """Guard, opcode and operands of each statement, and the statement after each label."""
    statements: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        statement = line.strip()
        while found := re.match(r"(\$?\w+):(?!:)\s*", statement):
            labels[found[1]] = len(statements)
            statement = statement[found.end() :]
        # A brace at the begin of a statement opens a scope. Braces of vectors are within statements.
        statement = statement.removeprefix("{").lstrip()
        if statement in ("", "}", ")") or statement.startswith((".", "(")):
            continue
        match = _STATEMENT.fullmatch(statement)
        assert match, statement
        operands = [text.strip() for text in re.split(r",(?![^{\[]*[}\]])", match[3] or "")]
        statements.append((match[1] or "", match[2], operands))
    return statements, labels
