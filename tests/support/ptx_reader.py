"""Read the PTX of one kernel: its instructions, its loops and where its registers come from.

A row loop is the innermost loop around a store to global memory, if it draws and loads nothing from there: the loop
down the rows of a chunk, or where dimensions lie side by side, along the columns. A loop that copies is one around such
a store that does not draw, be it within a row loop; its instructions are not counted there. Where noise is shared,
libNVVM takes what is left of the rows out of the row loop.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

__all__ = ["Instruction", "Kernel", "Loop", "opcodes_of"]


def opcodes_of(body: str) -> collections.Counter[str]:
    """How often a kernel has each instruction, inline assembly included."""
    code = re.sub(r"//.*", "", body)
    return collections.Counter(re.findall(r"(?:^|[;{}])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=[\s;])", code, re.M))


_NO_RESULT = re.compile(r"(st|bra|brx|ret|exit|bar|barrier|membar|fence|trap|call|red)\b")
_STATEMENT = re.compile(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.S)
_COPIES = re.compile(r"(mov|neg|abs|selp|shfl)\.")


@dataclasses.dataclass(eq=False)
class Instruction:
    guard: str | None
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


@dataclasses.dataclass
class Loop:
    instructions: list[Instruction]
    loads_per_row: float

    @functools.cached_property
    def count(self) -> collections.Counter[str]:
        return collections.Counter(instruction.opcode for instruction in self.instructions)

    def matching(self, pattern: str) -> int:
        return sum(count for opcode, count in self.count.items() if re.fullmatch(pattern, opcode))

    @property
    def copies(self) -> bool:
        """Whether it takes to global memory what has been drawn elsewhere."""
        return not self.matching(r"(fma|mul|add)\.(rn\.)?f(32|64)")

    @property
    def hands_over(self) -> bool:
        return self.matching(r"shfl\..*") > 0

    @property
    def rows(self) -> float:
        """By what they load, other than what is stored as it was loaded."""
        stored = {r for i in self.instructions if i.opcode.startswith("st.global") for r in i.sources}
        quads = [i for i in self.instructions if re.fullmatch(r"ld\.shared\.(v4\.[bfu]32|v2\.[bfu]64)", i.opcode)]
        return sum(not stored.issuperset(i.results) for i in quads) / self.loads_per_row


class Kernel:
    """The one kernel of a PTX program, with the loops in it and where its registers come from."""

    def __init__(self, ptx: str, loads_per_row: float) -> None:
        program = re.sub(r"//.*", "", ptx)
        assert len(re.findall(r"\.entry\b", program)) == 1 and not re.search(r"\.func\b", program)
        head, self.body = program.split(".entry")[1].split("{", 1)
        self.parameters: list[str] = re.findall(r"\.param\s+\.(\w+)\s+\w+_param_\d+\b", head)
        assert len(self.parameters) == head.count(".param")
        self.bounds = {name: int(number) for name, number in re.findall(r"\.(maxntid|minnctapersm)\s+(\d+)", head)}
        self._loads_per_row = loads_per_row
        self.blocks = list(self._cut())
        self.instructions = [instruction for _, block in self.blocks for instruction in block]
        self.count = collections.Counter(instruction.opcode for instruction in self.instructions)
        self.makers: dict[str, list[Instruction]] = collections.defaultdict(list)
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.instructions:
            for register in instruction.results:
                self.makers[register].append(instruction)
            for register in set(instruction.sources):
                self.users[register].append(instruction)

    def _cut(self) -> Iterator[tuple[str, list[Instruction]]]:
        """Labels, if they have one, and instructions of the basic blocks."""
        label, block = "", list[Instruction]()
        for line in re.split(r"[;\n]", self.body):
            # Braces around a few statements, with a register of their own; those of vectors stand within statements.
            statement = line.strip().removeprefix("{").lstrip()
            if statement in ("", "}") or statement.startswith("."):
                continue
            if found := re.fullmatch(r"(\$?\w+):", statement):
                if label or block:  # Else a jump was just before, and nothing leads here.
                    yield label, block
                label, block = found[1], []
                continue
            found = _STATEMENT.fullmatch(statement)
            assert found, statement
            operands = [text.strip() for text in re.split(r",(?![^{\[]*[}\]])", found[3] or "")]
            block.append(Instruction(found[1], found[2], operands))
            if re.match(r"bra|ret|exit", found[2]):
                yield label, block
                label, block = "", []
        assert not block

    def _following(self) -> list[list[int]]:
        index = {label: k for k, (label, _) in enumerate(self.blocks) if label}
        following = []
        for k, (_, block) in enumerate(self.blocks):
            last = block[-1] if block else Instruction(None, "nop", [])
            assert not last.opcode.startswith("brx"), "a table of jumps, which nothing here knows"
            jumps = [index[last.operands[0]]] if last.opcode.startswith("bra") else []
            ends = re.match(r"bra|ret|exit", last.opcode) and last.guard is None
            following.append(jumps if ends else [*jumps, k + 1])
        return following

    @functools.cached_property
    def row_loops(self) -> list[Loop]:
        return [loop for loop in self.store_loops if not loop.copies]

    @functools.cached_property
    def store_loops(self) -> list[Loop]:
        """Loops that draw and loops that copy."""
        following = self._following()
        before: list[list[int]] = [[] for _ in self.blocks]
        for k, after in enumerate(following):
            for j in after:
                before[j].append(k)
        # Blocks that every way to a block leads through.
        everything = set(range(len(self.blocks)))
        dominators = [everything if before[k] else {k} for k in everything]
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for k in sorted(everything - {0}):
                if before[k]:
                    new = {k} | set.intersection(*(dominators[j] for j in before[k]))
                    changed |= new != dominators[k]
                    dominators[k] = new
        loops: dict[int, set[int]] = {}
        for k, after in enumerate(following):
            for head in dominators[k] & set(after):
                body, found = loops.setdefault(head, {head}), [k]
                while found:
                    j = found.pop()
                    if j not in body:
                        body.add(j)
                        found += before[j]
        innermost: dict[int, set[int]] = {}
        for k, (_, block) in enumerate(self.blocks):
            around = [head for head in loops if k in loops[head]]
            if around and any(instruction.opcode.startswith("st.global") for instruction in block):
                head = min(around, key=lambda head: len(loops[head]))
                innermost[head] = loops[head]
        found_loops = []
        for body in innermost.values():
            within = set[int]().union(*(other for other in innermost.values() if other < body))
            if not any(i.opcode.startswith("ld.global") for k in body for i in self.blocks[k][1]):
                instructions = [i for k in sorted(body - within) for i in self.blocks[k][1]]
                found_loops.append(Loop(instructions, self._loads_per_row))
        return found_loops

    def maker(self, register: str) -> Instruction | None:
        """What makes it, if that is one instruction."""
        made = self.makers.get(register, [])
        return made[0] if len(made) == 1 else None

    def constant(self, operand: str) -> str | None:
        """Of an operand that is one, its digits in PTX: bits of floating-point numbers, decimal ones of integers."""
        if re.fullmatch(r"0[fd][0-9A-Fa-f]+|-?\d+", operand):
            return operand[:2] + operand[2:].upper()
        made = self.maker(operand)
        return self.constant(made.operands[1]) if made and made.opcode.startswith("mov.") else None

    def origins(self, register: str, seen: set[str]) -> Iterator[Instruction]:
        """What may have made its value, however often it was copied or its sign changed."""
        if register in seen:
            return
        seen.add(register)
        for made in self.makers.get(register, []):
            if _COPIES.match(made.opcode):
                for source in made.sources:
                    yield from self.origins(source, seen)
            else:
                yield made
