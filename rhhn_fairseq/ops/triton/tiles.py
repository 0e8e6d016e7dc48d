"""How the programs of a Triton kernel share the rows of a batch."""

from dataclasses import dataclass

ELEMENTS = 1024
"""Elements of a program, if the batch has that many: enough to keep the loads of four warps in flight."""


@dataclass(frozen=True)
class Tile:
    """ROWS rows of COLS elements for each of ``blocks`` programs of ``warps`` warps."""

    rows: int
    cols: int
    warps: int
    blocks: int

    @staticmethod
    def of(B: int, H: int) -> "Tile":
        """The tiles of [B, H]: complete rows, because of normalisation, rounded up to a power of two."""
        cols = power_of_two(H)
        rows = min(max(1, ELEMENTS // cols), power_of_two(B))
        # Four elements a thread: the backward pass keeps about twenty numbers for each in registers.
        warps = min(max(1, rows * cols // 128), 16)
        return Tile(rows, cols, warps, -(-B // rows))

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of a kernel."""
        return {"ROWS": self.rows, "COLS": self.cols, "num_warps": self.warps}


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
