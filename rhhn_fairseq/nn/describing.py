"""Documentation and signatures of the layers, from the declarations of their options."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields

from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.layers.stack import StackConfig

STACK = {
    spec.name: spec
    for spec in fields(StackConfig)
    if spec.name in ("residual_from", "input_dropout", "output_dropout", "weight_drop", "dropout_mask")
}
"""Options of layers that connect or regularise the layers of a stack."""


USAGE = """Called as torch.nn.LSTM is: ``output, state = layer(input, state)``.

Args:
    input_size: C, width of the input.
    hidden_size: H, width of the output in one direction.
    num_layers: L, layers above each other.
    bias: whether there are biases. Constants, such as the one added to the forget gate, stay without them.
    batch_first: whether batched input and output are [B, T, ...] in place of [T, B, ...]. As in torch, it
        changes neither states nor unbatched input, and input of the other order cannot be told apart.
    dropout: probability of dropping the outputs of every layer but the last.
    bidirectional: whether a second set of layers reads from the end (D = 2).
    device, dtype: of the parameters.
    backend: one of rhhn_fairseq.ops.backends.NAMES; None for the fastest, or what RHHN_KERNEL says.
    lstm_state: give and take the state as two tensors (h, c) for any cell, see State.
    proj_size: as of torch.nn.LSTM, for LSTM alone.
    context_size: K, width of a condition that every layer reads beside its input, see ``forward``; 0: none.
    context_to: "hyper" if the hypernetwork alone reads it, "both" if the main network does too, which any
        cell can.
    initial_state: "zeros" or "learned", parameters that a call without a state starts from; the latter
        excludes resets.
{stack}
{options}

Input: [T, B, C], with batch_first [B, T, C], unbatched [T, C], or a PackedSequence, sorted or not.

Output: [T, B, D H], with batch_first [B, T, D H], unbatched [T, D H], or a PackedSequence.

State: {states}.
    {form}The entry of layer l and direction d is 2 l + d if bidirectional, else l. None starts from
    zeros, and so do entries left out at the end. Without a batch the dimension B is missing.
    With lstm_state it is (h, c) as of torch.nn.LSTM; c holds all entries but the first, in an order in which
    two of them side by side are those of a layer of twice the widths.

Raises:
    UsageError: a size or an option is impossible, or a shape does not fit; the message says what would.
"""


def _lines(options, defaults: dict) -> str:
    """Returns the lines of a docstring about options."""
    lines = []
    for spec in options:
        choices = spec.metadata["choices"]
        values = f" ({', '.join(choices)})" if choices else ""
        default = defaults.get(spec.name, spec.default)
        line = f"{spec.name}={default!r}: {spec.metadata['help']}{values}"
        lines += textwrap.wrap(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


def usage(layer, options) -> str:
    """Returns the end of a layer's docstring."""
    defaults = cell_options(layer.cell)
    if "hyper_size" in defaults:
        defaults["hyper_size"] = f"a quarter of hidden_size, at most {defaults['hyper_size']}"
    own = _lines(options, defaults)
    single = len(layer.state_names) == 1
    if single:
        states = f"{layer.state_names[0]}, one tensor [D L, B, ·] as of torch.nn.GRU"
    elif layer.state_names:
        states = f"a tuple ({', '.join(layer.state_names)}) of tensors [D L, B, ·]"
    else:
        states = "a tuple of tensors [D L, B, ·], the cell's entries; one tensor if there is one entry"
    form = "" if single else "Widths are in ``state_sizes``. "
    return USAGE.format(stack=_lines(STACK.values(), {}), options=own, states=states, form=form)


def signature(constructor: Callable, options) -> inspect.Signature:
    """Returns the constructor's signature with a cell's options in place of ``**options``."""
    listed = list(inspect.signature(constructor).parameters.values())[1:-1]
    own = (
        ("backend", None),
        ("lstm_state", None),
        ("context_size", 0),
        ("context_to", "hyper"),
        ("initial_state", "zeros"),
        *((name, spec.default) for name, spec in STACK.items()),
    )
    for name, default in (*own, *options):
        listed.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    return inspect.Signature(listed)
