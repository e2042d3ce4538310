"""A slow, simple implementation of Tetris: a board is a set of cells (row, column), and a feature is one expression."""

from collections.abc import Iterator, Sequence

from reference.stream import MASK32, philox4x32_10

Cells = frozenset[tuple[int, int]]

WIDTH = 10
DRAWN = ["####", "## ##", "### .#.", ".## ##.", "##. .##", "### ..#", "### #.."]


def cells_of(text: str) -> Cells:
    """The full cells of a drawing, whose lowest row is row 0."""
    lines = text.split()
    return frozenset((len(lines) - 1 - i, j) for i, line in enumerate(lines) for j, c in enumerate(line) if c == "#")


def turned(cells: Cells) -> Cells:
    """The cells after a quarter turn clockwise, moved back to the corner."""
    width = max(column for _, column in cells)
    return frozenset((width - column, row) for row, column in cells)


def orientations(kind: int) -> list[Cells]:
    shapes = [cells_of(DRAWN[kind])]
    for _ in range(3):
        shapes.append(turned(shapes[-1]))
    return list(dict.fromkeys(shapes))


def piece(seed: int, game: int, number: int) -> int:
    block = number // 4
    counter = (block & MASK32, game & MASK32, game >> 32, block >> 32)
    key = ((seed & MASK32) ^ int.from_bytes(b"Tetr", "big"), (seed >> 32) ^ int.from_bytes(b"is's", "big"))
    return philox4x32_10(counter, key)[number % 4] * 7 >> 32


class Placement:
    """One piece dropped on a board, and its features."""

    def __init__(self, board: Cells, shape: Cells, left: int, height: int) -> None:
        at = height + 4
        while not any((at - 1 + row, left + column) in board or at - 1 + row < 0 for row, column in shape):
            at -= 1
        self.piece = {(at + row, left + column) for row, column in shape}
        self.fits = all(row < height for row, _ in self.piece)
        both = board | self.piece
        self.full = [row for row in range(height) if all((row, column) in both for column in range(WIDTH))]
        left = [(row, column) for row, column in both if row not in self.full]
        self.after = frozenset((row - sum(f < row for f in self.full), column) for row, column in left)
        self.height = height

    def is_full(self, row: int, column: int) -> bool:
        if row < 0 or not 0 <= column < WIDTH:
            return True
        return (row, column) in self.after

    def is_hole(self, row: int, column: int) -> bool:
        return not self.is_full(row, column) and any(self.is_full(above, column) for above in range(row, self.height))

    def is_on_hole(self, row: int, column: int) -> bool:
        if not self.is_full(row, column) or row == 0:
            return False
        return not self.is_full(row - 1, column) or self.is_on_hole(row - 1, column)

    def well(self, row: int, column: int) -> int:
        if self.is_full(row, column) or not (self.is_full(row, column - 1) and self.is_full(row, column + 1)):
            return 0
        return next(depth for depth in range(1, row + 2) if self.is_full(row - depth, column))

    def dellacherie(self) -> list[float]:
        board = [(row, column) for row in range(self.height) for column in range(WIDTH)]
        rows = [row for row, _ in self.piece]
        row_borders = [(row, column) for row in range(self.height) for column in range(-1, WIDTH)]
        column_borders = [(row, column) for row in range(-1, self.height) for column in range(WIDTH)]
        return [
            (min(rows) + max(rows)) / 2,
            len(self.full) * sum(row in self.full for row in rows),
            sum(self.is_full(row, column) != self.is_full(row, column + 1) for row, column in row_borders),
            sum(self.is_full(row, column) != self.is_full(row + 1, column) for row, column in column_borders),
            sum(self.is_hole(*cell) for cell in board),
            sum(self.well(*cell) for cell in board),
            sum(self.is_on_hole(*cell) for cell in board),
            sum(any(self.is_hole(row, column) for column in range(WIDTH)) for row in range(self.height)),
        ]

    def bertsekas(self) -> list[float]:
        heights = [max((row + 1 for row, c in self.after if c == column), default=0) for column in range(WIDTH)]
        differences = [abs(heights[column] - heights[column + 1]) for column in range(WIDTH - 1)]
        return [*heights, *differences, max(heights), sum(heights) - len(self.after), 1]

    def features(self, name: str) -> list[float]:
        return self.dellacherie() if name == "dellacherie" else self.bertsekas()


def placements(board: Cells, kind: int, height: int) -> Iterator[tuple[int, int, Placement]]:
    """Turn, column and result of each placement that fits."""
    for turn, shape in enumerate(orientations(kind)):
        for left in range(WIDTH - max(column for _, column in shape)):
            placement = Placement(board, shape, left, height)
            if placement.fits:
                yield turn, left, placement


def play(
    weights: Sequence[int], seed: int, game: int, *, features: str, height: int, most_pieces: int
) -> list[tuple[int, int, int, int, Cells]]:
    """Kind, turn, column, lines so far and board of each move. Integer weights keep ties exact."""
    board: Cells = frozenset()
    moves, lines = [], 0
    for number in range(most_pieces):
        kind = piece(seed, game, number)
        best = None
        for turn, left, placement in placements(board, kind, height):
            value = sum(weight * feature for weight, feature in zip(weights, placement.features(features), strict=True))
            if best is None or value > best[0]:
                best = value, turn, left, placement
        if best is None:
            break
        _, turn, left, placement = best
        board, lines = placement.after, lines + len(placement.full)
        moves.append((kind, turn, left, lines, board))
    return moves
