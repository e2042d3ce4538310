"""Parse the PTX of one kernel: its instructions, its loops and the definitions of its registers.

A row loop is the innermost loop around a store to global memory that computes samples and does not load from global
memory. It iterates over the rows of a chunk, or in transposed layouts over the columns. A copy loop is a loop around
such a store that computes nothing. A copy loop within a row loop does not count as part of it. With common noise,
libNVVM moves the remainder of the rows out of the row loop.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

__all__ = ["Instruction", "Kernel", "Loop", "opcodes_of"]


def opcodes_of(body: str) -> collections.Counter[str]:
    """Counts of a kernel's instructions, including inline assembly."""
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
        """Whether the loop only copies samples to global memory."""
        return not self.matching(r"(fma|mul|add)\.(rn\.)?f(32|64)")

    @property
    def shuffles(self) -> bool:
        return self.matching(r"shfl\..*") > 0

    @property
    def rows(self) -> float:
        """Number of rows per iteration, from the loads whose values are not stored unchanged."""
        stored = {r for i in self.instructions if i.opcode.startswith("st.global") for r in i.sources}
        quads = [i for i in self.instructions if re.fullmatch(r"ld\.shared\.(v4\.[bfu]32|v2\.[bfu]64)", i.opcode)]
        return sum(not stored.issuperset(i.results) for i in quads) / self.loads_per_row


class Kernel:
    """The only kernel of a PTX program, with its loops and the definitions of its registers."""

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
        """The basic blocks: label (or "") and instructions."""
        label, block = "", list[Instruction]()
        for line in re.split(r"[;\n]", self.body):
            # A brace at the begin of a statement opens a scope. Braces of vectors are within statements.
            statement = line.strip().removeprefix("{").lstrip()
            if statement in ("", "}") or statement.startswith("."):
                continue
            if found := re.fullmatch(r"(\$?\w+):", statement):
                if label or block:  # Otherwise the block is empty and unreachable: a jump precedes it.
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
            assert not last.opcode.startswith("brx"), "jump tables are not supported"
            jumps = [index[last.operands[0]]] if last.opcode.startswith("bra") else []
            ends = re.match(r"bra|ret|exit", last.opcode) and last.guard is None
            following.append(jumps if ends else [*jumps, k + 1])
        return following

    @functools.cached_property
    def row_loops(self) -> list[Loop]:
        return [loop for loop in self.store_loops if not loop.copies]

    @functools.cached_property
    def store_loops(self) -> list[Loop]:
        """Row loops and copy loops."""
        following = self._following()
        before: list[list[int]] = [[] for _ in self.blocks]
        for k, after in enumerate(following):
            for j in after:
                before[j].append(k)
        # The dominators of each block.
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
