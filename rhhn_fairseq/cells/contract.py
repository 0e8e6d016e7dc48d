"""The contract of a recurrent cell: what the author of a cell writes.

A cell defines the affine maps of its input (``input_maps``), its equations (``step``), its noise
(``sample_noise``), and what never depends on the main state (``prepare``). The loop over time, masks, carried
state and the choice of a backend are written once, in ``running`` and in ``ops``. A cell with a fused
operation passes its parameters to it in ``run_fused``.

Shapes: T time, B batch, C input, H hidden, G gates times H. Vectors are rows: an input [B, C] is
multiplied as ``x_BC @ W_CG``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import CellConfig, StateConfig
from rhhn_fairseq.ops.backends import Plan, torch_nn
from rhhn_fairseq.ops.loop import Noise, State, noise_at
from rhhn_fairseq.ops.matmul.gemm import Matrix, affine
from rhhn_fairseq.ops.regularise import detach_by_coin, draw_mask, dropout, zoneout
from rhhn_fairseq.saving import Pretrained, rename_old

InputMap = tuple[Tensor, Tensor | None]


class Contract(Pretrained, nn.Module):
    """What a cell is. Subclass ``running.Cell``, which adds how it runs, with ``input_maps`` and ``step``.

    Attributes:
        config: the checked configuration.
        state_sizes: widths of the state's tensors, the first of which is the output.
        prepared_states: how many tensors at the end of the state ``prepare`` runs over the whole sequence.
        update_size: number of units that the option ``recurrent_dropout`` drops in a step, if there is one.
        begins: whether the first step of a sequence without a state differs from the others, see ``begin``.
        operation: name of the fused operation that computes what ``step`` does, see ``backends``; None
            if there is none. A subclass that defines more than properties, as of ``parametrize``, does not
            inherit it, because it may override what ``step`` does.
        affine_weights: names of the weights that only ``ops.matmul.gemm.affine`` reads, so that they may be
            quantised.
        recurrent_weights: names of the weights that multiply a state, which ``layers.stack`` may drop;
            inner cells name their own. A cell whose matrices have other names sets both attributes.
        backend: name of the backend that this cell must use; None leaves the choice to the environment or
            ``backends``.
        taken: the vectors that scale the recurrent matrices, which a pass appends for ``hooks.take_scaling``,
            tensors [T, K, B, H]; None if nobody asks for them.
        keeps_initial_values: whether a model that draws all weights anew leaves this cell's as they are,
            because they multiply each other and near zero would let nothing pass. A model also leaves those
            of cells with gains or scaling vectors.
    """

    kind = "cell"
    state_sizes: tuple[int, ...]
    update_size: int
    config: StateConfig
    prepared_states: int = 0
    begins: bool = False
    operation: str | None = None
    affine_weights: tuple[str, ...] = ("weight_x", "weight_h")
    recurrent_weights: tuple[str, ...] = ("weight_h",)
    backend: str | None = None
    taken: list[Tensor] | None = None
    keeps_initial_values: bool = False

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        own = vars(cls)
        if not all(name.startswith("__") or isinstance(value, property) for name, value in own.items()):
            cls.operation = own.get("operation")

    def __init__(self, config: StateConfig):
        super().__init__()
        self.config = config
        self.state_sizes = (config.hidden_size,)
        self.update_size = config.hidden_size
        # Columns for a condition are added to the weight before its product.
        unread = "weight_x" if getattr(config, "hyper_context", 0) else None
        self.affine_weights = tuple(name for name in self.affine_weights if name != unread)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        rename_old(state_dict)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def input_maps(self) -> tuple[InputMap, ...]:
        """Returns the affine maps of the input: pairs of a weight [C, ·] and a bias [·] or None."""
        raise NotImplementedError(f"{type(self).__name__} has no input maps")

    def project(self, x_TBC: Tensor, gemm: str | None = None) -> tuple[Tensor, ...]:
        """Returns the projections of the input, [T, B, ·], in the order in which ``step`` takes them.

        Each weight takes one GEMM for the whole sequence.

        Args:
            gemm: which GEMM to use, see ``ops.matmul.gemm.affine``.
        """
        return apply_maps(x_TBC, self.input_maps(), gemm)

    def maps_of(self, columns: slice) -> tuple[InputMap, ...]:
        """Returns the input maps of a slice of the input's columns; the slice that starts at 0 has the bias.

        The projections of slices that cover the input add up to the whole projection. Take slices once,
        before a loop: every slicing costs a zero-filled gradient of the whole weight.
        """
        first = columns.start in (None, 0)
        return tuple((weight[columns], bias if first else None) for weight, bias in self.input_maps())

    def begin(self, g: tuple[Tensor, ...], first_TB1: Tensor | None) -> tuple[Tensor, ...]:
        """Adjusts the projections of sequences that start without a state; by default, changes nothing.

        Args:
            first_TB1: what ``running.first_positions`` returns.
        """
        return g

    def prepare(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[tuple[Tensor, ...], State]:
        """Computes, for the whole sequence, what never reads the main state; by default, nothing.

        Args:
            plan: how the pass runs.
        """
        return g, state

    def sample_noise(self, T: int, B: int, device=None, generator=None) -> Noise:
        """Draws every random number of a training pass of T steps over B sequences.

        Returns:
            bool tensors [T or 1, B or 1, ·] by name: a leading 1 means one mask per sequence,
            [T, 1, 1] one coin per time step. Empty when the configuration asks for no noise.
        """
        config, noise = self.config, {}
        H = config.hidden_size
        if isinstance(config, CellConfig) and config.gal_dropout:
            noise["gal"] = draw_mask((1, B, H), 1.0 - config.gal_dropout, device, generator)
        if config.zoneout:
            noise["zoneout"] = draw_mask((T, B, H), config.zoneout, device, generator)
        if isinstance(config, CellConfig) and config.h_detach:
            noise["h_detach"] = draw_mask((T, 1, 1), config.h_detach, device, generator)
        if rate := getattr(config, "recurrent_dropout", 0.0):
            steps = 1 if getattr(config, "recurrent_mask", "step") == "sequence" else T
            noise["update"] = draw_mask((steps, B, self.update_size), 1.0 - rate, device, generator)
        return noise

    def step(self, g_t: tuple[Tensor, ...], state: State, noise_t: Noise | None) -> tuple[Tensor, State]:
        """Computes one time step by the paper's equations.

        With ``state_matrices`` it also takes ``matrices=None``: as many, to use in place of the cell's own,
        such as ones scaled by a hypernetwork.

        Args:
            g_t: the projection at this step, tensors [B, ·].
            state: tensors [B, ·] in ``state_sizes`` order.
            noise_t: this step's share of ``sample_noise``; None in evaluation.

        Returns:
            the output [B, H] and the next state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def state_matrices(self) -> dict[str, Matrix]:
        """Returns by name the matrices by which ``step`` multiplies states with ``ops.matmul.gemm.affine``.

        A cell that has them can be scaled by any hypernetwork (the cell ``hyper``).
        """
        return {}

    def shared_matrices(self) -> Sequence[Matrix] | None:
        """Returns ``matrices`` for every ``step`` of a pass, computed once; None for its own."""
        return None

    def run_fused(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[Tensor, State]:
        """Computes all steps with the cell's fused operation, on what ``prepare`` returned."""
        raise NotImplementedError(f"{type(self).__name__} has no fused operation")

    def torch_weights(self) -> torch_nn.Weights:
        """Returns the parameters in the layout of torch.nn's layer with the same equations."""
        raise NotImplementedError(f"torch.nn has no {type(self).__name__}")

    def recurrent_input(self, h_BH: Tensor, noise_t: Noise | None) -> Tensor:
        """Returns the state as a matrix reads it: detached by the coin (h-detach), dropped out (Gal)."""
        assert isinstance(self.config, CellConfig)
        h_BH = detach_by_coin(h_BH, noise_at(noise_t, "h_detach"))
        return dropout(h_BH, self.config.gal_dropout, noise_at(noise_t, "gal"))

    def zoned(self, old: Tensor, new: Tensor, noise_t: Noise | None) -> Tensor:
        """Returns the new output state after zoneout."""
        return zoneout(old, new, self.config.zoneout, noise_at(noise_t, "zoneout"))

    def zero_state(self, B: int, device=None, dtype=None) -> State:
        """Returns the zero state of B sequences."""
        state = []
        for size in self.state_sizes:
            state.append(torch.zeros(B, size, device=device, dtype=dtype))
        return tuple(state)

    def adjust_initial_values(self) -> None:
        """Changes weights that have just been drawn as the options say; by default, nothing.

        A model that draws the weights anew calls it afterwards.
        """

    def diagnostics(self) -> dict[str, float]:
        """Returns figures about the trained weights for the log; by default, none."""
        return {}


class OneMatrixEach:
    """Part of a cell that reads its input by ``weight_x`` and its state by ``weight_h``.

    Attributes:
        input_bias: whether ``bias`` is added to the input's product for the whole sequence.
    """

    config: StateConfig
    weight_x: nn.Parameter
    weight_h: nn.Parameter
    bias: nn.Parameter
    input_bias: bool = True

    def add_matrices(self, gates: int, input_size: int | None = None) -> None:
        """Adds both, with a block of H columns for each gate: Glorot uniform, and orthogonal."""
        C, H = input_size or self.config.input_size, self.config.hidden_size
        self.weight_x = nn.Parameter(torch.empty(C, gates * H))
        self.weight_h = nn.Parameter(torch.empty(H, gates * H))
        glorot_(self.weight_x, gates)
        orthogonal_(self.weight_h, gates)

    def input_maps(self) -> tuple[InputMap, ...]:
        return ((self.weight_x, self.bias if self.input_bias else None),)

    def state_matrices(self) -> dict[str, Matrix]:
        return {"weight_h": self.weight_h}


def without_context(weight: Tensor, context_size: int) -> Tensor:
    """Returns an input weight that ignores further columns of the input, [C + context_size, ·]."""
    return nn.functional.pad(weight, (0, 0, 0, context_size)) if context_size else weight


def apply_maps(x: Tensor, maps: tuple[InputMap, ...], gemm: str | None = None) -> tuple[Tensor, ...]:
    """Returns ``x W + b`` for each weight and bias; x is [..., C], ``gemm`` as for ``affine``."""
    g = []
    for weight, bias in maps:
        g.append(affine(x, weight, bias, gemm))
    return tuple(g)


def orthogonal_(weight: Tensor, gates: int = 1) -> None:
    """Fills each of ``gates`` equal column blocks of ``weight`` [C, G] with an orthogonal matrix."""
    for block in weight.data.chunk(gates, dim=1):
        # No float type smaller than float32 has the decomposition that this needs.
        wide = torch.empty_like(block, dtype=torch.promote_types(block.dtype, torch.float32))
        block.copy_(nn.init.orthogonal_(wide))


def glorot_(weight: Tensor, gates: int = 1) -> None:
    """Fills each of ``gates`` column blocks of ``weight`` [C, G] as Glorot uniform, by its own fan."""
    for block in weight.data.chunk(gates, dim=1):
        nn.init.xavier_uniform_(block)
