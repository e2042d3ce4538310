"""Parse the PTX of one kernel: its instructions, and the definitions and uses of its registers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

from ptx_machine import statements_of

__all__ = ["FAST", "Instruction", "Kernel", "opcodes_of"]

FAST = {f"{name}.approx.ftz.f32" for name in ("lg2", "sqrt", "cos", "sin")}
"""The approximate instructions of fast_math."""


def opcodes_of(body: str) -> collections.Counter[str]:
    """Counts of a kernel's instructions, including inline assembly."""
    code = re.sub(r"//.*", "", body)
    return collections.Counter(re.findall(r"(?:^|[;{}])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=[\s;])", code, re.M))


_NO_RESULT = re.compile(r"(st|bra|brx|ret|exit|bar|barrier|membar|fence|trap|call|red)\b")
_COPIES = re.compile(r"(mov|neg|abs|selp|shfl)\.")


@dataclasses.dataclass(eq=False)
class Instruction:
    opcode: str
    operands: list[str]

    @functools.cached_property
    def results(self) -> list[str]:
        return [] if _NO_RESULT.match(self.opcode) else _registers(self.operands[0])

    @functools.cached_property
    def sources(self) -> list[str]:
        return _registers(" ".join(self.operands[bool(self.results) :]))


def _registers(text: str) -> list[str]:
    return re.findall(r"%[a-z]+\d+\b", text)


class Kernel:
    """The only kernel of a PTX program."""

    def __init__(self, ptx: str) -> None:
        program = re.sub(r"//.*", "", ptx)
        assert len(re.findall(r"\.entry\b", program)) == 1 and not re.search(r"\.func\b", program)
        head, body = program.split(".entry")[1].split("{", 1)
        self.parameters: list[str] = re.findall(r"\.param\s+\.(\w+)\s+\w+_param_\d+\b", head)
        assert len(self.parameters) == head.count(".param")
        self.bounds = {name: int(number) for name, number in re.findall(r"\.(maxntid|minnctapersm)\s+(\d+)", head)}
        self.instructions = [Instruction(opcode, operands) for _, opcode, operands in statements_of(body)[0]]
        self.count = collections.Counter(instruction.opcode for instruction in self.instructions)
        self.makers: dict[str, list[Instruction]] = collections.defaultdict(list)
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.instructions:
            for register in instruction.results:
                self.makers[register].append(instruction)
            for register in set(instruction.sources):
                self.users[register].append(instruction)

    def maker(self, register: str) -> Instruction | None:
        """The instruction that defines `register`, or None if there are several."""
        made = self.makers.get(register, [])
        return made[0] if len(made) == 1 else None

    def constant(self, operand: str) -> str | None:
        """The constant's digits in PTX (bits of a floating-point number, or a decimal integer); None for a variable."""
        if re.fullmatch(r"0[fd][0-9A-Fa-f]+|-?\d+", operand):
            return operand[:2] + operand[2:].upper()
        made = self.maker(operand)
        return self.constant(made.operands[1]) if made and made.opcode.startswith("mov.") else None

    def origins(self, register: str, visited: set[str]) -> Iterator[Instruction]:
        """The instructions that may have computed the value, followed through copies and changes of sign."""
        if register in visited:
            return
        visited.add(register)
        for made in self.makers.get(register, []):
            if _COPIES.match(made.opcode):
                for source in made.sources:
                    yield from self.origins(source, visited)
            else:
                yield made
