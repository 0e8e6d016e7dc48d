"""The loop over a cell's step: correct for every cell, device and dtype, and the reference for all faster
code.

Shapes: T time, B batch.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as scan_node

State = tuple[Tensor, ...]
Noise = dict[str, Tensor]

Step = Callable[[tuple[Tensor, ...], State, Noise | None], tuple[tuple[Tensor, ...], State]]
"""Maps a step's projections, the state and the step's noise to outputs [B, ...] and the next state.

What a network feeds back into itself, such as a context that its last output queried, is computed inside the
step.
"""


def scan(
    step: Step, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None
) -> tuple[tuple[Tensor, ...], State]:
    """Runs ``step`` at every position.

    Args:
        g: projections of the input, tensors [T, B, ...]; each step gets its own.
        state: tensors [B, ...].
        mask_TB: true at real positions. At all others the state is unchanged and the first output is zero.
        noise: see ``slice_noise``. The entry "resets" [T, B, 1] is true before the steps at which the state
            starts anew from zeros; the loop itself reads it.

    Returns:
        the step's outputs [T, B, ...], and the state after the last step.
    """
    resets: Any = None
    if noise is not None and "resets" in noise:
        resets, noise = noise["resets"], {name: noise[name] for name in noise if name != "resets"}
    if isinstance(g[0].shape[0], torch.SymInt) and not noise and torch.compiler.is_exporting():
        return _scan_any_length(step, g, state, mask_TB, resets)
    mask_TB1: Any
    mask_TB1, outputs = None if mask_TB is None else mask_TB.unsqueeze(-1), []
    cleared = () if resets is None else steps_with(resets)
    padded = () if mask_TB1 is None else steps_with(~mask_TB1)
    # Unbinding once gives one backward node that stacks. If every step indexed, each step's backward would
    # fill a tensor as large as the sequence.
    for t, g_t in enumerate(zip(*(tensor.unbind(0) for tensor in g), strict=True)):
        if t in cleared:
            state = clear_state(resets[t], state)
        out, new = step(g_t, state, slice_noise(noise, t))
        state = keep_state(mask_TB1[t], new, state) if t in padded else new
        outputs.append(out)
    y, *others = (stacked(each) for each in zip(*outputs, strict=True))
    return (y if mask_TB1 is None else y.masked_fill(~mask_TB1, 0.0), *others), state


def stacked(entries: tuple[Tensor, ...]) -> Tensor:
    """Returns ``torch.stack(entries)``; in compiled code, a view if there is one entry.

    The inductor of torch 2.13 makes that view too, but after deciding what the backward pass may overwrite. A
    returned state that is also kept for the gradient then changes in the backward pass.
    """
    if len(entries) == 1 and torch.compiler.is_compiling():
        return entries[0].unsqueeze(0)
    return torch.stack(entries)


def steps_with(rows: Tensor) -> Collection[int]:
    """Returns the steps at which something is true, of bool [T, B] or [T, B, 1].

    Where reading it would wait for a GPU or is impossible, these are all steps.
    """
    if rows.is_cuda or rows.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return range(rows.shape[0])
    if type(rows) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(rows):
        return range(rows.shape[0])
    return set(rows.flatten(1).any(1).nonzero().flatten().tolist())


def _scan_any_length(
    step: Step, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, resets_TB1: Tensor | None
) -> tuple[tuple[Tensor, ...], State]:
    """Runs ``scan`` for torch.export with unknown T: as one node, whose body is one step."""
    T, B = g[0].shape[:2]
    resets = () if resets_TB1 is None else (resets_TB1,)
    mask_TB1 = g[0].new_ones(T, B, 1, dtype=torch.bool) if mask_TB is None else mask_TB.unsqueeze(-1)

    def body(state, inputs):
        real_B1, *g_t = inputs
        if resets:
            state = clear_state(g_t.pop(), state)
        (y, *others), new = step(tuple(g_t), state, None)
        if mask_TB is not None:
            y, new = y.masked_fill(~real_B1, 0.0), keep_state(real_B1, new, state)
        # The node's results must not share memory with each other or with its inputs.
        return tuple(map(_copy, new)), tuple(map(_copy, (y, *others)))

    state, outputs = scan_node(body, tuple(map(_copy, state)), (mask_TB1, *g, *resets))
    return outputs, state


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def slice_noise(noise: Noise | None, t: int) -> Noise | None:
    """Returns the noise of step ``t``, tensors [B or 1, ...]; entries with a leading 1 serve every step."""
    if noise is None:
        return None
    return {name: draw[t if draw.shape[0] > 1 else 0] for name, draw in noise.items()}


def noise_at(noise_t: Noise | None, name: str) -> Tensor | None:
    """Returns one entry of a step's noise; None in evaluation and if the entry was not asked for."""
    return None if noise_t is None else noise_t.get(name)


def keep_state(real_B1: Tensor, new: State, old: State) -> State:
    """Returns the new state at real positions, the old one at padding."""
    return tuple(
        after if after is before else torch.where(real_B1, after, before)
        for after, before in zip(new, old, strict=True)
    )


def clear_state(resets_B1: Tensor, state: State) -> State:
    """Returns the state with zeros for the sequences that start anew."""
    return tuple(tensor.masked_fill(resets_B1, 0.0) for tensor in state)


def inner_noise(noise: Noise | None) -> Noise | None:
    """Returns the noise of a hypernetwork: the entries named "hyper_...", without that, and the resets."""
    if noise is None:
        return None
    named = {name.removeprefix("hyper_"): draw for name, draw in noise.items() if name.startswith("hyper_")}
    return named | {name: noise[name] for name in ("resets",) if name in noise}


def detach_state(state: State) -> State:
    """Returns the state detached from the graph, where truncated back-propagation stops."""
    return tuple(tensor.detach() for tensor in state)


def reorder_state(state: State, index_B: Tensor) -> State:
    """Returns the state of the chosen sequences, for beam search; ``index_B`` may repeat entries."""
    return tuple(tensor.index_select(0, index_B) for tensor in state)
