"""Counts the operations in a cell's matrix products, and times these products on their own.

The floor runs the cell's products at their real shapes one after another, as recurrence requires: no
implementation that goes step by step can be faster, unless it keeps matrices closer to the arithmetic units
than a matrix product does.

Shapes: T time, B batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.machine import forced, now, records
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import PackedWeight, mm


@dataclass(frozen=True)
class Product:
    """A matrix product of a cell: ``stack`` products of [rows, inner] with [inner, columns].

    Attributes:
        hoisted: whether it is one product for the whole sequence, with T times as many rows.
    """

    stack: int
    rows: int
    inner: int
    columns: int
    hoisted: bool

    def flop(self, T: int) -> int:
        """Returns the operations over T steps: two a weight and row forward, twice as many backward."""
        return 6 * T * self.stack * self.rows * self.inner * self.columns


class _Record(TorchDispatchMode):
    """Records the shapes of the operands of every matrix product."""

    # Position of the first of the two factors among the arguments.
    PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = self.PRODUCTS.get(function.overloadpacket.__name__)
        if first is not None:
            self.shapes.append((tuple(args[first].shape), tuple(args[first + 1].shape)))
        return function(*args, **(kwargs or {}))


def products_of(cell: Cell, B: int) -> list[Product]:
    """Returns the matrix products of one step of a cell on torch's meta device, in order.

    They are read from runs of the equations over one step and over two: a product that occurs once with
    2 B rows in the second run is computed for the whole sequence at once.
    """
    one, two = _shapes(cell, 1, B), _shapes(cell, 2, B)
    hoisted_shapes = [(stack, rows // 2, *rest) for stack, rows, *rest in two if rows == 2 * B]
    products = []
    for shape in one:
        hoisted = shape in hoisted_shapes
        if hoisted:
            hoisted_shapes.remove(shape)
        products.append(Product(*shape, hoisted=hoisted))
    return products


def _shapes(cell: Cell, T: int, B: int) -> list[tuple[int, int, int, int]]:
    """Returns the sizes of all products of a pass: stack, rows, inner width, columns."""
    with forced("reference"), torch.no_grad(), _Record() as record:
        cell(torch.empty(T, B, cell.config.input_size, device="meta"))
    return [(1 if len(left) == 2 else left[0], *left[-2:], right[-1]) for left, right in record.shapes]


class Floor:
    """The products of a cell over T steps, forward and backward, with nothing between them.

    Forward: the hoisted products, then the others T times. Backward: the gradients of the rows, T times,
    then the gradient of every matrix as one product over all steps, as in a kernel that saves its operands.
    On a GPU each pass is a CUDA graph, because launching such products takes longer than computing them.
    """

    def __init__(self, products: list[Product], T: int, device, dtype: torch.dtype):
        self.T, self.device = T, device
        self.hoisted = [_Factors(p, p.rows * T, 1, device, dtype) for p in products if p.hoisted]
        self.steps = [_Factors(p, p.rows, T, device, dtype) for p in products if not p.hoisted]
        self.all_steps = [_Factors(p, p.rows * T, 1, device, dtype) for p in products if not p.hoisted]
        self.passes = [self._forward, self._backward]
        if records(device):
            with torch.cuda.device(device):
                # A body that reads nothing and returns nothing: the buffers are its operands.
                bodies = [lambda _, run=run: run() or () for run in self.passes]
                self.passes = [graphs.record(body, []).replay for body in bodies]

    def time(self) -> tuple[float, float]:
        """Returns the seconds of the forward and the backward products."""
        start = now(self.device)
        self.passes[0]()
        middle = now(self.device)
        self.passes[1]()
        return middle - start, now(self.device) - middle

    def _forward(self) -> None:
        for factors in self.hoisted + self.T * self.steps:
            factors.forward()

    def _backward(self) -> None:
        for factors in self.T * self.steps[::-1] + self.hoisted:
            factors.to_rows()
        for factors in self.all_steps + self.hoisted:
            factors.to_matrix()


class _Factors:
    """Random operands of a product and of its gradients, with buffers for the results.

    Products run as in sequences (``gemm``): those over several steps with a packed matrix. Results have
    buffers of their own, because operands that were overwritten would grow to infinity within a few
    rounds.
    """

    def __init__(self, product: Product, rows: int, steps: int, device, dtype: torch.dtype):
        def draw(*shape) -> Tensor:
            return torch.randn(product.stack, *shape, device=device).to(dtype)

        self.x, self.weight = draw(rows, product.inner), draw(product.inner, product.columns)
        self.dy = draw(rows, product.columns)
        self.gemm = gemm.select_gemm(dtype, self.x.device)
        self.results: dict[str, Tensor] = {}
        self.packed: dict[str, PackedWeight] = {}
        if product.stack == 1 and steps > 1:
            weight = self.weight[0]
            self.packed["y"] = PackedWeight(weight, steps, rows, self.gemm)
            self.packed["dx"] = PackedWeight(weight, steps, rows, self.gemm, transpose=True)

    def forward(self) -> None:
        self._multiply(self.x, self.weight, "y")

    def to_rows(self) -> None:
        self._multiply(self.dy, self.weight.transpose(1, 2), "dx")

    def to_matrix(self) -> None:
        self._multiply(self.x.transpose(1, 2), self.dy, "dweight")

    def _multiply(self, left: Tensor, right: Tensor, name: str) -> None:
        if name not in self.results:
            self.results[name] = left.new_empty(len(left), left.shape[1], right.shape[2])
        result = self.results[name]
        if len(left) == 1:
            # A stack of one is multiplied as plain matrices.
            left, right, result = left[0], right[0], result[0]
        if name in self.packed:
            self.packed[name].product(left, result)
        else:
            mm(left, right, result, None, self.gemm)
