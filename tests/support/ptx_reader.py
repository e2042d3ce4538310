"""Parse the PTX of one kernel: its instructions, and the operations that it may have."""

import collections
import re
from collections.abc import Iterator


def opcodes_of(ptx: str) -> collections.Counter[str]:
    """Counts of a kernel's instructions, including inline assembly; `ptx` has its parameters and its body."""
    return collections.Counter(opcode for opcode, _ in _statements(ptx.partition("{")[2]))


_STATEMENT = re.compile(r"(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.S)


def _statements(body: str) -> Iterator[tuple[str, list[str]]]:
    """Opcode and operands of each statement."""
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        # A brace at the begin of a statement opens a scope. Braces of vectors are within statements.
        statement = re.sub(r"^(\$?\w+:(?!:)\s*)+", "", line.strip()).removeprefix("{").lstrip()
        if statement in ("", "}", ")") or statement.startswith((".", "(")):
            continue
        match = _STATEMENT.fullmatch(statement)
        assert match, statement
        yield match[1], [text.strip() for text in re.split(r",(?![^{\[]*[}\]])", match[2] or "")]


_FLOAT = re.compile(r".*\.(b?f16|f32|f64)\b.*")
# Moves, loads, stores and changes of sign.
_MOVES = r"(mov|selp|neg|(ld|st)(\.\w+)?)(\.v[24])?\."
# Permitted operations by computing type, with conversions of words and of elements of mu and sigma. In float32
# kernels, float64 is only loaded and converted.
_ALLOWED = {
    "float32": re.compile(
        rf"(fma\.rn|(mul|add|sub)(\.rn)?)\.f32|{_MOVES}f32|cvt\.rn\.f32\.([us](16|32|64)|f64)|cvt\.f32\.f16"
        r"|(ld(\.(param|global))?|mov)\.f64"
    ),
    "float64": re.compile(
        rf"(fma\.rn|sqrt\.rn|(mul|add|sub)(\.rn)?)\.f64|{_MOVES}f(32|64)|cvt\.rn\.f64\.[us](16|32|64)"
        r"|cvt\.f64\.f32|cvt\.f32\.f16"
    ),
}
_FAST = {f"{name}.approx.ftz.f32" for name in ("lg2", "sqrt", "cos", "sin")}


def unexpected_operations(found: collections.Counter[str], dtype: str, fast_math: bool) -> set[str]:
    """Operations that a kernel for results of type `dtype` must not have, since they cost time or change bits, such as
    calls, divisions and local memory, and required ones that it lacks.
    """
    odd = {name for name in found if re.match(r"call|div\.(?![us]32$)|rem\.|.*\.(local|r[zmp]i?)\b", name)}
    is_wide = dtype == "float64"
    narrowing = {"float16": "cvt.rn.f16.f32", "bfloat16": "cvt.rn.bf16.f32"}.get(dtype)
    approximate = set() if is_wide else _FAST if fast_math else {"rsqrt.approx.ftz.f32"}
    allowed = _ALLOWED["float64" if is_wide else "float32"]
    others = {name for name in found if _FLOAT.fullmatch(name) and not allowed.fullmatch(name)} - {narrowing}
    return odd | (others ^ approximate)
