"""Recurrent layers with the constructor and the calling convention of ``torch.nn.LSTM``, for any cell.

Shapes: T time, B batch, C input, H hidden, D directions (1 or 2), L layers, N steps of all packed sequences.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rhhn_fairseq.cells.config import describe_config
from rhhn_fairseq.cells.hooks import take_scaling
from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.packed import Packed
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.nn.arguments import all_tensors, check_arguments, remove_biases, renamed, sized_options
from rhhn_fairseq.nn.describing import STACK, signature, usage
from rhhn_fairseq.nn.interchange import TorchWeights
from rhhn_fairseq.nn.states import join_entries, map_state, split_entries
from rhhn_fairseq.ops.loop import State, stacked
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight
from rhhn_fairseq.saving import Pretrained


class RecurrentLayer(TorchWeights, Pretrained, nn.Module):
    """Base of all layers. A subclass names its cell in the registry and the entries of its state."""

    kind = "layer"
    cell: str
    state_names: tuple[str, ...] = ()
    proj_size = 0
    __signature__: inspect.Signature

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        # Switches such as layer_norm are set by the class that stands for them.
        options = [
            spec
            for spec in fields(CELLS[cls.cell].config)
            if spec.default is not MISSING and spec.type is not bool and spec.name != "hyper_context"
        ]
        defaults = cell_options(cls.cell)
        if "hyper_size" in defaults:
            defaults["hyper_size"] = None
        own = inspect.cleandoc(cls.__doc__ or f"Layers of the cell {cls.cell}.")
        cls.__doc__ = f"{own}\n\n{usage(cls, options)}"
        named = [(spec.name, defaults[spec.name]) for spec in options]
        cls.__signature__ = signature(RecurrentLayer.__init__, named)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device=None,
        dtype: torch.dtype | None = None,
        **options,
    ):
        super().__init__()
        name = type(self).__name__
        backend, lstm_state = options.pop("backend", None), options.pop("lstm_state", None)
        if "nonlinearity" in options:  # torch.nn.RNN's name for it.
            options["activation"] = options.pop("nonlinearity")
        self.context_size = options.pop("context_size", 0)
        self.context_to = options.pop("context_to", "hyper")
        if self.context_to not in ("hyper", "both"):
            raise UsageError(f"{name}: context_to={self.context_to!r} is unknown, choose from hyper, both")
        pair = bool(lstm_state) if lstm_state is None else lstm_state
        switches = dict(bias=bias, batch_first=batch_first, bidirectional=bidirectional, lstm_state=pair)
        check_arguments(name, options.pop("proj_size", 0), switches, num_layers, dropout)
        if dropout and num_layers == 1:
            warnings.warn(
                f"{name}: dropout={dropout} acts between layers, and num_layers=1 leaves none", stacklevel=2
            )
        if lstm_state is None and len(self.state_names) == 2 and self.state_names != ("h", "c"):
            warnings.warn(
                f"{name}: the state is ({', '.join(self.state_names)}), no (h, c), though it unpacks as one; "
                "lstm_state=True gives (h, c), and lstm_state=False this state without a warning",
                stacklevel=2,
            )
        self.initial_state = options.pop("initial_state", "zeros")
        if self.initial_state not in ("zeros", "learned"):
            given = f"initial_state={self.initial_state!r}"
            raise UsageError(f"{name}: {given} is unknown, choose from zeros, learned")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.bidirectional, self.lstm_state = bidirectional, pair
        joining = {key: options.pop(key) for key in STACK if key in options}
        self.options = sized_options(self.cell, hidden_size, options)
        if self.initial_state == "learned" and self.options.get("first_step") == "skip":
            raise UsageError(f"{name}: first_step='skip' has no effect with initial_state='learned'")
        with torch.device(torch.get_default_device() if device is None else device):
            try:
                config = StackConfig(
                    cell=self.cell,
                    input_size=input_size,
                    hidden_size=hidden_size,
                    layers=num_layers,
                    bidirectional_layers=num_layers if bidirectional else 0,
                    layer_dropout=float(dropout),
                    context_size=self.context_size,
                    cell_options=self.options | self._context_options(),
                    **joining,
                )
                self.stack = self._build(config)
            except UsageError as error:
                raise renamed(error, name) from None
            # A module of fake tensors cannot be converted.
            dtype = dtype or torch.get_default_dtype()
            if any(weight.dtype != dtype for weight in self.stack.parameters()):
                self.stack.to(dtype=dtype)
            if self.initial_state == "learned":
                rows = self.directions * num_layers
                entries = (torch.zeros(rows, 1, width, dtype=dtype) for width in self.state_sizes)
                self.learned_state = nn.ParameterList(entries)
        self.backend = backend

    def _build(self, config: StackConfig) -> Stack:
        stack = Stack(config)
        if not self.bias:
            remove_biases(stack)
        return stack

    def _context_options(self) -> dict[str, int]:
        """Returns the cell's option for a condition that its hypernetwork alone reads."""
        if not self.context_size or self.context_to == "both":
            return {}
        if "hyper_context" not in cell_options(self.cell):
            raise UsageError(
                f"{type(self).__name__}: context_size={self.context_size}, but the cell has no hypernetwork; "
                "give context_to='both'"
            )
        return {"hyper_context": self.context_size}

    @property
    def backend(self) -> str | None:
        """The backend that all cells must use; see ``rhhn_fairseq.cells.set_backend``."""
        return self._backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        set_backend(self, name)
        self._backend = name

    @property
    def dropout(self) -> float:
        """Probability of dropping the outputs of every layer but the last; it may be changed."""
        return self.stack.config.layer_dropout

    @dropout.setter
    def dropout(self, rate: float) -> None:
        self.stack.config = replace(self.stack.config, layer_dropout=rate)

    @property
    def directions(self) -> int:
        """D: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def _weight(self) -> Tensor:
        """A weight; the replicas of torch.nn.DataParallel have no parameters."""
        weight = self.stack.cells[0].input_maps()[0][0]
        return weight.scales if isinstance(weight, QuantisedWeight) else weight

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Widths of the entries of the state, in the order of ``state_names``."""
        return self.stack.cells[0].state_sizes

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises all weights again, as the method of torch.nn.LSTM does; sharded ones too."""
        with self._weight.device:
            fresh = dict(all_tensors(self._build(self.stack.config)))
        for name, weight in all_tensors(self.stack):
            new = fresh[name]
            if hasattr(weight, "device_mesh"):
                placed: Any = weight
                new = torch.distributed.tensor.distribute_tensor(
                    new.to(weight.dtype), placed.device_mesh, placed.placements
                )
            weight.copy_(new)
        for entry in self.learned_state if self.initial_state == "learned" else ():
            entry.zero_()

    def zero_state(self, B: int, device=None, dtype: torch.dtype | None = None) -> Tensor | State:
        """Returns zeros as the state of B sequences, in the weights' type."""
        weight, rows = self._weight, self.directions * self.num_layers
        empty = torch.zeros(rows, B, 0, device=device or weight.device, dtype=dtype or weight.dtype)
        state = tuple(empty.new_zeros(rows, B, width) for width in self._entries())
        return state if len(state) > 1 else state[0]

    def flatten_parameters(self) -> None:
        """Does nothing; scripts written for torch.nn.LSTM call it."""

    def extra_repr(self) -> str:
        cell = self.stack.cells[0].config
        # The cell's input and its option of this name include the condition.
        own = {"input_size": self.input_size}
        own |= {"hyper_context": 0} if hasattr(cell, "hyper_context") else {}
        words = [describe_config(dataclasses.replace(cell, **own))]
        if self.proj_size:
            # To the cell, what is projected is its memory.
            inner = f"{self.proj_size}, memory_size={self.hidden_size}"
            words = [words[0].replace(inner, str(self.hidden_size), 1), f"proj_size={self.proj_size}"]
        for name, default in (("num_layers", 1), ("batch_first", False), ("dropout", 0.0)):
            value = getattr(self, name)
            if value != default:
                words.append(f"{name}={value}")
        words += [f"{name}=True" for name in ("bidirectional", "lstm_state") if getattr(self, name)]
        words += ["bias=False"] * (not self.bias)
        config = self.stack.config
        for name, spec in STACK.items():
            if getattr(config, name) != spec.default:
                words.append(f"{name}={getattr(config, name)!r}")
        if self.backend is not None:
            words.append(f"backend={self.backend!r}")
        if self.initial_state != "zeros":
            words.append(f"initial_state={self.initial_state!r}")
        if self.context_size:
            words.append(f"context_size={self.context_size}, context_to={self.context_to!r}")
        sizes = [str(size) for size in self.state_sizes]
        if self.state_names:
            sizes = [f"{name} {size}" for name, size in zip(self.state_names, sizes, strict=True)]
        states = ", ".join(sizes)
        return ", ".join(words) + f", state=({states})"

    def __repr__(self) -> str:
        # One line, as torch.nn.LSTM's; ``layer.stack`` shows every cell.
        return f"{type(self).__name__}({self.extra_repr()})"

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | State | None = None,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        resets: Tensor | None = None,
        context: Tensor | None = None,
        return_scaling: bool = False,
    ):
        """Runs the layers over a batch of sequences; see the class for shapes.

        Args:
            input: a tensor or a PackedSequence. hx: the state to start from; None for zeros.
            lengths: whole numbers [B]: how many steps of each sequence are real; padding follows them. Equal
                to a PackedSequence, with zeros for outputs at padding.
            mask: in place of lengths, true at real positions, in the form of resets. Padding may be anywhere;
                a reset there clears the state that passes it.
            resets: bool [T, B], with batch_first [B, T], unbatched [T]: true before the steps at which a
                sequence starts anew without a state, as if it were cut there. Those of a PackedSequence are
                padded, in the order of the batch before it was packed; those after its end do not count.
            context: the condition, [B, K] or one for each step, [T, B, K] or with batch_first [B, T, K];
                unbatched without B.
            return_scaling: whether to return what the hypernetworks generated, too.

        Returns:
            the output, in the form of ``input``, and the last state, as described for ``hx``; with
            ``return_scaling`` also a list of the vectors that scaled the recurrent weights of each layer,
            [T, B, K, H] or in the form of ``input``, see ``take_scaling``; they have no gradient.
        """
        if isinstance(input, torch.fx.Proxy):
            tracer, keywords = input.tracer, {"lengths": lengths, "mask": mask, "resets": resets}
            keywords |= {"context": context, "return_scaling": return_scaling or None}
            keywords = {key: value for key, value in keywords.items() if value is not None}
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input, hx), keywords)
        try:
            if not return_scaling:
                return self._forward(input, hx, lengths, mask, resets, context)
            if self.bidirectional or isinstance(input, PackedSequence):
                given = "two directions" if self.bidirectional else "packed input"
                raise UsageError(f"{type(self).__name__}: return_scaling is not possible with {given}")
            with take_scaling(self.stack.cells) as scaling:
                output, state = self._forward(input, hx, lengths, mask, resets, context)
            if input.dim() == 2:
                return output, state, [vectors.squeeze(1) for vectors in scaling]
            return output, state, [v.transpose(0, 1) for v in scaling] if self.batch_first else scaling
        except UsageError as error:
            raise renamed(error, type(self).__name__) from None

    def _forward(self, input, hx, lengths, mask, resets, context):
        """Runs ``forward``, with errors that name cells."""
        if resets is not None and (self.bidirectional or self.initial_state == "learned"):
            refused = "bidirectional=True" if self.bidirectional else "initial_state='learned'"
            raise UsageError(f"{type(self).__name__}: resets are not possible with {refused}")
        if lengths is not None and (mask is not None or isinstance(input, PackedSequence)):
            raise UsageError(f"{type(self).__name__}: lengths are not possible with a mask or packed input")
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, resets, context)
        self._check_input(input)
        is_batched = input.dim() == 3
        x_TBC = input if is_batched else input.unsqueeze(1)
        if is_batched and self.batch_first:
            x_TBC = input.transpose(0, 1)
        T, B, _ = x_TBC.shape
        if B == 0 and T > 0:
            # It depends on all weights, so that a script may go backward from it.
            total = sum((weight.sum() for weight in self.parameters()), self._weight.sum())
            y = x_TBC.new_zeros(T, 0, self.stack.output_size) + total
            state = map_state(total.add, self.zero_state(0, x_TBC.device, x_TBC.dtype))
            return y.transpose(0, 1) if self.batch_first else y, state
        mask, resets = self._positions(mask, is_batched), self._positions(resets, is_batched)
        if lengths is not None:
            mask = self._mask_of(lengths, T, B, x_TBC.device)
            resets = None if resets is None else resets & mask
        starts, context = self._starts(hx, B, is_batched, x_TBC), self._context(context, T, B, is_batched)
        if hx is not None:
            resets = self._with_first_steps(starts, mask, resets, T)
        y, finals = self.stack.run(x_TBC, starts, mask, resets_TB=resets, context_TBM=context)
        state = self._state(finals)
        if not is_batched:
            return y.squeeze(1), map_state(lambda entry: entry.squeeze(1), state)
        return y.transpose(0, 1) if self.batch_first else y, state

    def _mask_of(self, lengths: Tensor, T: int, B: int, device: torch.device) -> Tensor:
        """Returns where positions are real, [T, B]."""
        lengths = torch.as_tensor(lengths)
        # Numbers on a GPU are not read, because that would wait for it.
        readable = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
        readable = readable and gemm.transformation() is None
        if (
            lengths.shape != (B,)
            or lengths.is_floating_point()
            or (readable and not bool(((lengths >= 0) & (lengths <= T)).all()))
        ):
            given = lengths.tolist() if readable else f"of shape {tuple(lengths.shape)}"
            raise UsageError(
                f"{type(self).__name__}: lengths are {given}, expected {B} whole numbers from 0 to {T}"
            )
        return torch.arange(T, device=device).unsqueeze(1) < lengths.to(device)

    def _with_first_steps(self, starts, mask_TB: Tensor | None, resets_TB: Tensor | None, T: int):
        """Returns the resets, with one before the first step of each sequence whose state is zeros still: it
        has not begun, so its first step is that of a sequence without a state."""
        if not self.stack.cells[0].begins or self.bidirectional or torch.compiler.is_exporting():
            return resets_TB
        new_B = torch.stack([(entry == 0).all(-1) for start in starts for entry in start]).all(0)
        is_read = not torch.compiler.is_compiling() and gemm.transformation() is None
        if is_read and not torch.jit.is_tracing() and not bool(new_B.any()):
            return resets_TB
        real_TB = new_B.new_ones(T, len(new_B)) if mask_TB is None else mask_TB
        first_TB = real_TB & (real_TB.cumsum(0) == 1) & new_B
        return first_TB if resets_TB is None else resets_TB | first_TB

    def _positions(self, given: Tensor | None, is_batched: bool = True) -> Tensor | None:
        """Returns what a caller says about every position as [T, B]."""
        if given is None or not is_batched:
            return None if given is None else given.unsqueeze(1)
        return given.transpose(0, 1) if self.batch_first else given

    def _context(self, given: Tensor | None, T: int, B: int, is_batched: bool = True) -> Tensor | None:
        """Returns the condition as [T, B, K]."""
        K = self.context_size
        if given is None and not K:
            return None
        if isinstance(given, Tensor):
            context = given if is_batched else given.unsqueeze(-2)
            if context.dim() == 3 and is_batched and self.batch_first:
                context = context.transpose(0, 1)
            if K and context.shape in ((B, K), (T, B, K), (1, K)):
                return context.expand(T, B, K)
        shape = tuple(given.shape) if isinstance(given, Tensor) else given
        raise UsageError(
            f"{type(self).__name__}: context has shape {shape}, expected [B, {K}] or one for each step, with "
            "context_size as given to the constructor"
        )

    def _forward_packed(
        self, packed: PackedSequence, hx, resets, context
    ) -> tuple[PackedSequence, Tensor | State]:
        data, sizes, order, back = packed
        if data.dim() != 2 or data.shape[-1] != self.input_size:
            raise UsageError(
                f"{type(self).__name__}: the packed data have shape {tuple(data.shape)}, "
                f"expected [N, {self.input_size}]"
            )
        places = Packed(sizes, data.device)
        T, B, x_N1C = places.T, places.B, data.unsqueeze(1)
        if hx is not None and order is not None:
            hx = map_state(lambda entry: entry.index_select(1, order), self._checked(hx, B, True))
        resets, context = self._positions(resets), self._context(context, T, B)
        if order is not None:
            resets = None if resets is None else resets.index_select(1, order)
            context = None if context is None else context[:, order]
        if context is not None:
            context = context[places.steps, places.rows].unsqueeze(1)
        starts = self._starts(hx, B, True, x_N1C)
        if hx is not None:
            resets = self._with_first_steps(starts, None, resets, T)
        y, finals = self.stack.run(x_N1C, starts, resets_TB=resets, context_TBM=context, packed=places)
        state = self._state(finals)
        if back is not None:
            state = map_state(lambda entry: entry.index_select(1, back), state)
        return PackedSequence(y.squeeze(1), sizes, order, back), state

    def _check_input(self, input) -> None:
        C, is_tensor = self.input_size, isinstance(input, Tensor)
        if is_tensor and input.dim() in (2, 3) and input.shape[-1] == C:
            return
        given = f"shape {tuple(input.shape)}" if is_tensor else f"type {type(input).__name__}"
        order = "B, T" if self.batch_first else "T, B"
        raise UsageError(
            f"{type(self).__name__}: input has {given}, expected [{order}, {C}], [T, {C}] for one sequence, "
            "or a PackedSequence"
        )

    def _entries(self) -> tuple[int, ...]:
        """Returns the widths of the entries of the state that a caller sees."""
        first, *others = self.state_sizes
        return (first, sum(others)) if self.lstm_state else self.state_sizes

    def _checked(self, hx, B: int, is_batched: bool) -> State:
        """Returns a caller's state as a tuple, checked; entries at the end may be missing."""
        state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        for entry in state:
            if not isinstance(entry, Tensor):
                given = type(entry).__name__
                raise UsageError(
                    f"{type(self).__name__}: state has type {given}, expected a tensor or a tuple of tensors"
                )
        widths = self._entries()
        rows = (self.directions * self.num_layers, *((B,) if is_batched else ()))
        expected = [(*rows, width) for width in widths]
        shapes = [tuple(entry.shape) for entry in state]
        # (h, c) of an LSTM may also start a cell whose state has more entries.
        allowed = [expected[: len(shapes)]]
        if self.lstm_state and len(self.state_sizes) > 1:
            allowed.append([expected[0], (*rows, self.state_sizes[1])])
        if not 1 <= len(shapes) <= len(widths) or shapes not in allowed:
            raise UsageError(f"{type(self).__name__}: state has shapes {shapes}, expected {expected}")
        return state

    def _starts(self, hx, B: int, is_batched: bool, x_TBC: Tensor) -> list[State | None]:
        """Returns the state of each cell, in the order of ``Stack.run``, from a caller's state."""
        D, L = self.directions, self.num_layers
        if hx is None and self.initial_state == "zeros":
            return [None] * (D * L)
        if hx is None:
            state = [entry.expand(-1, B, -1) for entry in self.learned_state]
            return self._of_cells(state)
        state = [entry if is_batched else entry.unsqueeze(1) for entry in self._checked(hx, B, is_batched)]
        if self.lstm_state and len(state) == 2:
            sizes = self.state_sizes[1:]
            given = sizes if state[1].shape[-1] == sum(sizes) else sizes[:1]
            state[1:] = split_entries(state[1], given) if given else []
        if 1 < len(state) < len(self.state_sizes) and not torch.compiler.is_compiling():
            warnings.warn(
                f"{type(self).__name__}: the state has {len(state)} of {len(self.state_sizes)} entries, the "
                "others start from zeros; lstm_state=True carries all of them as (h, c)",
                stacklevel=4,
            )
        for width in self.state_sizes[len(state) :]:
            state.append(x_TBC.new_zeros(D * L, B, width))
        return self._of_cells(state)

    def _of_cells(self, state: Sequence[Tensor]) -> list[State | None]:
        """Returns each cell's share of a state, in the order of ``Stack.run``."""
        D, L = self.directions, self.num_layers
        rows = [D * layer + direction for direction in range(D) for layer in range(L)]
        return [tuple(entry[row] for entry in state) for row in rows]

    def _state(self, finals: Sequence[State]) -> Tensor | State:
        """Returns the state for the caller, from those of the cells."""
        D, L = self.directions, self.num_layers
        ordered = [finals[direction * L + layer] for layer in range(L) for direction in range(D)]
        first, *others = (stacked(entry) for entry in zip(*ordered, strict=True))
        if self.lstm_state:
            return first, join_entries(others) if others else first[..., :0]
        return (first, *others) if others else first
