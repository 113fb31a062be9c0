"""Machine code of a kernel, as the disassembler prints it, and its main loop.

The main loop is the one that loads and stores whole quads. A path through it is found in the graph
of its jumps: the shortest one from wide load to wide load, and from wide store to wide store, back
to the start. What a path leaves out is what the loop can leave out: values that are not whole, slow
paths of divisions and roots, codes that must be divided exactly, and parameters that were edited.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
_LABEL = re.compile(r"\s*(\.L_\w+|\$\w+):")
_TARGET = re.compile(r"`\((\S+?)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    text: str

    @property
    def unconditional(self) -> str:
        """The text without a predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text)

    @property
    def operation(self) -> str:
        """The name with its modifiers, such as `LDG.E.128`."""
        return self.unconditional.split()[0]

    @property
    def is_conditional(self) -> bool:
        words = self.text.split(",")[0].split()
        return self.text.startswith("@") or any(re.fullmatch(r"!?U?P\d", w) for w in words[1:])

    @property
    def written(self) -> set[int]:
        """Registers that a load writes."""
        found = re.match(r"LDG\.E\.?(\w*)\S* R(\d+),", self.unconditional)
        if found is None:
            return set()
        width = {"64": 2, "128": 4}.get(found[1], 1)
        return set(range(int(found[2]), int(found[2]) + width))

    def uses(self, registers: set[int]) -> bool:
        """Return whether an operand is one of the registers; the first one is often a result."""
        if self.operation.startswith("ST") or "," not in self.text:
            operands = self.text
        else:
            operands = self.text.split(",", 1)[1]
        return any(int(number) in registers for number in _REGISTER.findall(operands))


class Code:
    """The code of one kernel.

    Args:
        text: What ``nvdisasm -c`` prints of it.
    """

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            if found := _LABEL.match(line):
                self._labels[found[1]] = len(self.instructions)
            elif found := _INSTRUCTION.match(line):
                self.instructions.append(Instruction(found[1].strip()))
        assert self.instructions, "the disassembler has printed no instruction"

    def count(self, *prefixes: str) -> int:
        """Return how many instructions have such an operation."""
        return sum(i.operation.startswith(prefixes) for i in self.instructions)

    def _next(self, at: int) -> list[int]:
        instruction = self.instructions[at]
        operation = instruction.operation.split(".")[0]
        if operation == "BRA":
            found = _TARGET.search(instruction.text)
            assert found, instruction.text
            jump = self._labels[found[1]]
            return [at + 1, jump] if instruction.is_conditional else [jump]
        if operation == "CALL" and not instruction.is_conditional:
            return []  # the slow path of a division or a root
        if operation in ("EXIT", "RET", "BRX") and not instruction.is_conditional:
            return []
        return [at + 1] if at + 1 < len(self.instructions) else []

    def _path(self, start: int, stop: int) -> list[int] | None:
        """Return the shortest path from one instruction to another, without the first one."""
        before = {start: start}
        queue = deque([start])
        while queue:
            at = queue.popleft()
            for after in self._next(at):
                if after == stop:
                    path = [stop]
                    while at != start:
                        path.append(at)
                        at = before[at]
                    return path[::-1]
                if after not in before:
                    before[after] = at
                    queue.append(after)
        return None

    def loop(self, loads: tuple[str, ...], stores: tuple[str, ...]) -> list[Instruction]:
        """Return the path of one turn of the main loop, from its first load on.

        Args:
            loads: Beginnings of operations that load whole quads.
            stores: Beginnings of operations that store whole quads.
        """
        wide = [
            at
            for at, i in enumerate(self.instructions)
            if i.operation.startswith((*loads, *stores)) and self._path(at, at)
        ]
        assert wide, "there is no loop with whole quads"
        first = next(at for at in wide if self.instructions[at].operation.startswith(loads))
        path, here, left = list[int](), first, set(wide) - {first}
        while True:
            # the next one is the nearest: from one turn to the next there is no shorter way
            found = [self._path(here, there) for there in left or {first}]
            nearest = min((p for p in found if p), key=len, default=None)
            assert nearest, "the loop does not come to all whole quads in turn"
            path += nearest
            here = nearest[-1]
            if here == first:
                break
            left.discard(here)
        # from the first load on, which is the last stop
        return [self.instructions[at] for at in [path[-1], *path[:-1]]]


def distances(loop: list[Instruction]) -> list[int]:
    """Return how many instructions after each wide load of a loop its result is first used.

    A use after the end of the turn is looked for in the next one.
    """
    found = []
    twice = loop + loop
    for at, instruction in enumerate(loop):
        if not re.match(r"LDG\.E\.(64|128)", instruction.operation):
            continue
        written = instruction.written
        assert written, instruction.text
        later = twice[at + 1 : at + len(loop) + 1]
        found.append(next((n for n, i in enumerate(later, 1) if i.uses(written)), len(loop)))
    return found
