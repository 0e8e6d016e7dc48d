"""Layers against torch.nn's, called as those are."""

import copy
import inspect
import io
import pickle
import pydoc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import rhhn_fairseq.nn as layers
from rhhn_fairseq.cells import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn.interchange import SHARED
from rhhn_fairseq.nn.states import join_entries

C, H, T, B = 4, 6, 7, 3

SCRIPT = """
import torch
from torch import nn
from torch.nn import LSTM
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)
rnn = LSTM(4, 6, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
head = nn.Linear(2 * 6, 3)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.05)
x, target = torch.randn(3, 7, 4), torch.tensor([0, 2, 1])
losses = []
for epoch in range(15):
    rnn.flatten_parameters()
    packed = pack_padded_sequence(x, torch.tensor([4, 7, 2]), batch_first=True, enforce_sorted=False)
    output, STATE = rnn(packed)
    h_n = STATE_0
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    logits = head(torch.cat([h_n[-2], h_n[-1]], dim=-1))
    loss = nn.functional.cross_entropy(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
again, _ = rnn(packed, STATE)
"""
IMPORT, CONSTRUCTOR = "from torch.nn import LSTM\n", "rnn = LSTM(4, 6, "


def _run(script: str, pair: bool) -> dict:
    """The names of a script that takes the state as a pair (h_n, c_n), or as it comes."""
    form = ("(h_n, c_n)", "h_n") if pair else ("state", "state[0]")
    names: dict = {}
    exec(script.replace("STATE_0", form[1]).replace("STATE", form[0]), names)
    return names


def _build(cell, *arguments, **options):
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    torch.manual_seed(0)
    return layers.layer_of(cell)(C, H, *arguments, **small, **options, dtype=torch.float64)


def _x(*shape):
    return torch.randn(*(shape or (T, B, C)), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _entries(state):
    return (state,) if isinstance(state, torch.Tensor) else state


def _equal(ours, theirs):
    for one, other in zip(_entries(ours), _entries(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def _check_script(pair: bool, line: str, replacement: str) -> None:
    assert SCRIPT.count(line) == 1
    before, after = _run(SCRIPT, pair), _run(SCRIPT.replace(line, replacement), pair)
    for name in ("padded", "h_n", "logits", "lengths"):
        assert before[name].shape == after[name].shape
    for names in (before, after):
        assert names["losses"][-1] < 0.5 * names["losses"][0]


@pytest.mark.parametrize("name", ["LSTM", "LNLSTM", "MLSTM", "HyperLSTM", "LNHyperLSTM"])
def test_one_line_of_a_script_changes(name):
    options = "hyper_size=3, lstm_state=True, " if "Hyper" in name else ""
    # The import alone, where the script takes the state as it comes or the cell's state is (h, c) too.
    _check_script(options == "", IMPORT, f"from rhhn_fairseq.nn import {name} as LSTM\n")
    _check_script(
        True, CONSTRUCTOR, f"from rhhn_fairseq import nn as ours; rnn = ours.{name}(4, 6, {options}"
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("shape", ["batched", "batch_first", "unbatched", "packed", "unsorted"])
@pytest.mark.parametrize("starts", [False, True])
def test_equals_torch(kind, shape, starts):
    torch.manual_seed(0)
    options = dict(num_layers=2, bidirectional=True, batch_first=shape == "batch_first")
    theirs = getattr(nn, kind)(C, H, **options).double()
    ours = getattr(layers, kind).from_torch(theirs)
    assert ours.num_layers == 2 and ours.bidirectional and ours.batch_first == theirs.batch_first
    unbatched = shape == "unbatched"
    x, hx = _x(*((T, C) if unbatched else (B, T, C) if options["batch_first"] else (T, B, C))), None
    if shape in ("packed", "unsorted"):
        lengths = [7, 4, 2] if shape == "packed" else [2, 7, 4]
        x = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=shape == "packed")
    if starts:
        hx = tuple(_x(4, *(() if unbatched else (B,)), H) * scale for scale in (0.5, 2.0))
        hx = hx[0] if kind == "GRU" else hx
    (y, state), (y_torch, state_torch) = ours(x, hx), theirs(x, hx)
    if isinstance(x, PackedSequence):
        assert isinstance(y, PackedSequence)
        assert torch.equal(y.batch_sizes, y_torch.batch_sizes)
        assert (y.unsorted_indices is None) == (y_torch.unsorted_indices is None)
        _equal(pad_packed_sequence(y)[0], pad_packed_sequence(y_torch)[0])
        y, y_torch = y.data, y_torch.data
    _equal(y, y_torch)
    _equal(state, state_torch)
    assert isinstance(state, tuple) == isinstance(state_torch, tuple)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0_reverse", "bias_ih_l0", "bias_hh_l0"])
def test_from_torch_leaves_frozen_weights_frozen(frozen):
    for kind, joined in ((nn.LSTM, ("bias",)), (nn.GRU, ("bias", "bias_n"))):
        theirs = kind(C, H, bidirectional=True)
        theirs.get_parameter(frozen).requires_grad_(False)
        if frozen == "bias_ih_l0":
            theirs.bias_hh_l0.requires_grad_(False)
        ours = getattr(layers, kind.__name__).from_torch(theirs)
        own = [name for name, parameter in ours.named_parameters() if not parameter.requires_grad]
        expected = {
            "weight_ih_l0": ["cells.0.weight_x"],
            "weight_hh_l0_reverse": ["backward_cells.0.weight_h"],
            "bias_ih_l0": [f"cells.0.{name}" for name in joined],
            # The other half of the summed bias is trained.
            "bias_hh_l0": [f"cells.0.{name}" for name in joined[1:]],
        }
        assert own == [f"stack.{name}" for name in expected[frozen]]


@pytest.mark.parametrize("cell", CELLS)
def test_any_cell_packed_equals_each_sequence_alone(cell):
    rnn, lengths = _build(cell, 2, bidirectional=True), [2, 7, 4]
    x = _x()
    hx = tuple(_x(4, B, size) for size in rnn.state_sizes)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    output, state = rnn(packed, hx)
    padded, _ = pad_packed_sequence(output)
    for b, n in enumerate(lengths):
        y, alone = rnn(x[:n, b], tuple(entry[:, b] for entry in hx))
        torch.testing.assert_close(padded[:n, b], y, rtol=0, atol=1e-13)
        for entry, single in zip(_entries(state), _entries(alone), strict=True):
            assert single.dim() == 2
            torch.testing.assert_close(entry[:, b], single, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cell", CELLS)
def test_any_cell_carries_its_state_in_both_forms(cell):
    rnn, x = _build(cell, 2), _x()
    whole, final = rnn(x)
    tail, last = rnn(x[3:], rnn(x[:3])[1])
    torch.testing.assert_close(tail, whole[3:], rtol=0, atol=1e-13)
    two = _build(cell, 2, lstm_state=True)
    _, (h, c) = two(x[:3])
    assert h.shape == (2, B, H) and c.shape == (2, B, sum(rnn.state_sizes[1:]))
    other_tail, (h, c) = two(x[3:], (h, c))
    torch.testing.assert_close(other_tail, whole[3:], rtol=0, atol=1e-13)
    joined = _entries(last)[1:]
    torch.testing.assert_close(c, join_entries(joined) if joined else c[..., :0])
    assert tuple(entry.shape[-1] for entry in _entries(final)) == rnn.state_sizes


def test_state_of_an_lstm_starts_a_hyperlstm():
    _, (h, c) = nn.LSTM(C, H).double()(_x())
    full = torch.zeros(1, B, 3, dtype=torch.float64)
    expected, _ = _build("hyperlstm")(_x(), (h, c, full, full))
    assert torch.equal(_build("hyperlstm")(_x(), (h, c))[0], expected)
    assert torch.equal(_build("hyperlstm", lstm_state=True)(_x(), (h, c))[0], expected)


@pytest.mark.parametrize("cell", CELLS)
def test_repr_help_and_signature_name_sizes_and_options(cell):
    rnn = _build(cell, 2, bidirectional=True)
    text = repr(rnn)
    assert text.startswith(f"{type(rnn).__name__}(4, 6, ") and "\n" not in text
    assert "num_layers=2, bidirectional=True" in text and "state=(" in text
    assert ("layer_norm=True" in text) == cell_options(cell).get("layer_norm", False)
    names = list(inspect.signature(type(rnn)).parameters)
    assert names[:7] == "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()
    assert len(rnn.state_names) == len(rnn.state_sizes)
    page = pydoc.plain(pydoc.render_doc(type(rnn)))
    for name, default in cell_options(cell).items():
        # The layers set that of a condition, from ``context_size``.
        if not isinstance(default, bool) and name != "hyper_context":
            shown = "'a quarter of hidden_size, at most 128'" if name == "hyper_size" else repr(default)
            assert name in names and f"{name}={shown}" in " ".join(page.split())
    assert "[B, T, C]" in page and "None starts from" in page


STATES = {
    "rhn": "s",
    "grid_rhn": "s layers",
    "gru": "h",
    "irnn": "h",
    "elman": "h",
    "jordan": "y",
    "hyperrnn": "h e",
    "ln_lstm": "h c",
    "ln_gru": "h",
    "lstm": "h c",
    "projected_lstm": "h c",
    "mogrifier_lstm": "h c",
    "nas": "h c",
    "hyper": "h c hyper_h hyper_c",
    "ln_hyperlstm": "h c e k",
    "hyperlstm": "h c e k",
    "hyperrhn": "s e",
    "mingru": "h",
    "minlstm": "h",
    "mlstm": "h c",
    "mi_lstm": "h c",
    "rolled_hyperrhn": "s e",
}


def test_layers_have_names_and_so_have_their_states():
    assert {cell: " ".join(_build(cell).state_names) for cell in CELLS} == STATES
    named = [getattr(layers, name) for name in layers.__all__]
    cells = [kind.cell for kind in named if inspect.isclass(kind) and hasattr(kind, "cell")]
    assert sorted(cells) == sorted(CELLS)
    assert all(layers.layer_of(cell) in named for cell in cells)


def test_device_dtype_copies_and_state_dict():
    rnn = layers.LNHyperLSTM(C, H, hyper_size=3, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in rnn.parameters()} == {("meta", torch.bfloat16)}
    rnn = _build("ln_hyperlstm", 2)
    other = copy.deepcopy(rnn)
    _equal(other(_x())[0], rnn(_x())[0])
    _equal(pickle.loads(pickle.dumps(rnn))(_x())[0], rnn(_x())[0])
    file = io.BytesIO()
    torch.save(rnn.state_dict(), file)
    file.seek(0)
    loaded = _build("ln_hyperlstm", 2)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    loaded.load_state_dict(torch.load(file))
    _equal(loaded(_x())[0], rnn(_x())[0])


@pytest.mark.parametrize("cell", ["gru", "ln_hyperlstm", "hyperrhn"])
def test_weights_can_be_initialised_again(cell):
    rnn = _build(cell, 2, bidirectional=True)
    first = copy.deepcopy(rnn.state_dict())
    rnn.requires_grad_(False)
    rnn.reset_parameters()
    assert any(not torch.equal(weight, first[name]) for name, weight in rnn.state_dict().items())
    torch.manual_seed(0)
    rnn.reset_parameters()
    for name, weight in rnn.named_parameters():
        torch.testing.assert_close(weight, first[name], rtol=0, atol=0)
        assert not weight.requires_grad


def test_layers_of_other_cells_can_be_pickled(monkeypatch):
    """Their classes are made by ``layer_of``."""
    monkeypatch.setitem(CELLS, "mine", CELLS["gru"])
    rnn = layers.layer_of("mine")(C, H).double()
    again = pickle.loads(pickle.dumps(rnn))
    assert type(again) is type(rnn)
    _equal(again(_x())[0], rnn(_x())[0])
    assert repr(rnn) == "mine(4, 6, state=(6))"
    assert "State: a tuple of tensors [D L, B, ·], the cell's entries; one tensor" in type(rnn).__doc__
    assert "main_cell='mine'" in repr(layers.Hyper(C, H, main_cell="mine", hyper_size=3))


def test_layers_in_bfloat16_from_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight = layers.LSTM(C, H).stack.cells[0].weight_h
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.dtype == torch.bfloat16
    block = weight.detach().float()[:, :H]
    # Eight bits of mantissa.
    torch.testing.assert_close(block @ block.t(), torch.eye(H), rtol=0, atol=2**-6)


def test_dropout_acts_between_layers_in_training_only():
    torch.manual_seed(0)
    rnn = _build("lstm", 2, dropout=0.5)
    assert not torch.equal(rnn(_x())[0], rnn(_x())[0])
    rnn.eval()
    assert torch.equal(rnn(_x())[0], rnn(_x())[0])
    with pytest.warns(UserWarning, match="num_layers=1 leaves none"):
        _build("lstm", dropout=0.5)


def test_backend_is_the_modules():
    rnn = _build("hyperrhn", 2, bidirectional=True, backend="reference")
    cells = [*rnn.stack.cells, *rnn.stack.backward_cells]
    assert {cell.backend for cell in cells} == {cell.hyper.backend for cell in cells} == {"reference"}
    assert "backend='reference'" in repr(rnn)
    rnn.backend = None
    assert {cell.backend for cell in cells} == {None}
    with pytest.raises(UsageError, match="backend='fast' is unknown, choose from native, "):
        rnn.backend = "fast"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"num_layers": 0}, "^LSTM: num_layers=0 is not a whole number of 1 or more"),
        ({"num_layers": 2, "dropout": 1.1}, "^LSTM: dropout=1.1 is not possible, it must be a number in"),
        ({"num_layers": 2, "dropout": None}, "^LSTM: dropout=None is not possible, it must be a number in"),
        ({"lstm_state": "yes"}, "^LSTM: lstm_state='yes' is neither True nor False"),
        ({"bias": None}, "LSTM: bias=None is neither True nor False"),
        ({"batch_first": 1}, "batch_first=1 is neither True nor False"),
        ({"proj_size": H}, "LSTM: proj_size=6 is not possible, it must be below hidden_size"),
        ({"projection": 3}, "LSTM: cell lstm has no option 'projection', it has c_detach"),
    ],
)
def test_impossible_options_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        layers.LSTM(**{"input_size": C, "hidden_size": H} | options)


@pytest.mark.parametrize(
    "make, idle, other",
    [
        (layers.RHN, dict(transform_bias=-2.0), dict(bias=False)),
        (layers.RHNCell, dict(transform_bias=-2.0), dict(bias=False)),
        (layers.RHN, dict(first_step="skip"), dict(initial_state="learned")),
        (partial(layers.HyperRNN, hyper_size=3), dict(hyper_init="paper"), dict(hyper_form="full")),
    ],
)
def test_an_option_that_another_makes_idle_is_refused(make, idle, other):
    ((name, value),) = idle.items()
    make(C, H, **idle), make(C, H, **other)
    with pytest.raises(UsageError, match=f"{name}={value!r} has no effect with"):
        make(C, H, **idle, **other)


def test_torchs_defaults_may_be_passed():
    assert repr(layers.LSTM(C, H, bias=True, proj_size=0)) == repr(layers.LSTM(C, H))
    arguments = (C, H, 2, False, True, 0.1, True, 2, "cpu", torch.float64)
    ours, theirs = layers.LSTM(*arguments), torch.nn.LSTM(*arguments)
    assert [getattr(ours, name) for name in SHARED] == [getattr(theirs, name) for name in SHARED]
    assert ours(torch.zeros(B, T, C).double())[0].shape == (B, T, 4)


def test_a_layer_is_shown_as_it_is_built():
    """Its cell has other sizes: a projected memory, or a condition beside the input."""
    assert repr(layers.LSTM(C, H, proj_size=2)).startswith("LSTM(4, 6, proj_size=2, state=")
    shown = repr(layers.LSTM(C, H, context_size=2, context_to="both"))
    assert shown == "LSTM(4, 6, layer_norm=False, context_size=2, context_to='both', state=(h 6, c 6))"
    shown = repr(layers.HyperRHN(C, H, rhn_depth=2, hyper_size=3, context_size=2, lstm_state=False))
    assert shown.startswith("HyperRHN(4, 6, rhn_depth=2, hyper_size=3, context_size=2, context_to='hyper', ")


def test_shapes_that_do_not_fit_are_refused():
    rnn = _build("lstm", batch_first=True)
    with pytest.raises(UsageError, match=r"shape \(7, 3, 5\), expected \[B, T, 4\], \[T, 4\] for one"):
        rnn(_x(T, B, C + 1))
    with pytest.raises(UsageError, match=r"packed data have shape \(21, 5\), expected \[N, 4\]"):
        rnn(pack_padded_sequence(_x(T, B, C + 1), torch.tensor([7, 7, 7])))
    with pytest.raises(UsageError, match=r"state has shapes \[\(1, 2, 6\)\], expected \[\(1, 3, 6\), \("):
        rnn(_x(B, T, C), (_x(1, 2, H),))
