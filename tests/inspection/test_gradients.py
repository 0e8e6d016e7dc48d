"""Gradients of the last step's loss over time and layers, against finite differences of the equations."""

import numpy as np
import pytest
import torch
from helpers import script_cli, tiny_char_lm
from helpers.tiny_reader import build

from rhhn_fairseq.cells.rhn import naive_highway, naive_rhn
from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.data.text.words import prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.gradients import Flow, gradient_flow
from rhhn_fairseq.inspection.pictures import draw_gradients

plot = script_cli.load("plot")
LINES = ("abba cd\nab", "d < caba d")
STEP = 1e-5
# Central differences of float64 losses with steps of 1e-5 err by 1e-11, measured 9e-12, and by 1e-10 of
# the value for the third derivative.
TOLERANCE = {"rel": 1e-6, "abs": 1e-10}


def tokens_of(vocabulary):
    return torch.tensor([prompt_indices(vocabulary, line) for line in LINES]).T


def loss_of(network, tokens, state, start):
    """The loss of each line [B] when the steps from ``start`` on are read from this state."""
    set_backend(network, "reference")
    with torch.no_grad():
        y = None
        for row in tokens[start:-1]:
            y, state = network.stack(network.embed(row[None]), state)
        return torch.nn.functional.cross_entropy(network.output(y[-1]), tokens[-1], reduction="none")


def differences(loss, tensor):
    """The gradient [B, H] of each line's loss by central differences of one element after the other."""
    gradient = torch.zeros_like(tensor)
    for column in range(tensor.shape[1]):
        shift = torch.zeros_like(tensor)
        shift[:, column] = STEP
        gradient[:, column] = (loss(tensor + shift) - loss(tensor - shift)) / (2 * STEP)
    return gradient


@pytest.mark.parametrize(
    "cell, layers, options",
    [
        ("hyperrhn", 2, dict(rhn_depth=1, hyper_size=3, first_step="skip")),
        ("gru", 2, {}),
    ],
)
def test_norms_over_time_are_those_of_finite_differences(cell, layers, options):
    network, vocabulary = build(cell, layers=layers, size=4, **options)
    tokens = tokens_of(vocabulary)
    norms, names, shares = gradient_flow(network, tokens)
    depth = options.get("rhn_depth", 1)
    assert norms.shape == (len(tokens) - 1, depth * layers) and len(names) == depth * layers
    assert shares.shape == (0,)
    state, width = None, len(network.stack.cells[0].state_sizes)
    for t in range(len(tokens) - 2):
        with torch.no_grad():
            _, state = network.stack(network.embed(tokens[t][None]), state)
        for layer in range(layers):
            entry = width * layer

            def loss(tensor, entry=entry, state=state, t=t):
                changed = (*state[:entry], tensor, *state[entry + 1 :])
                return loss_of(network, tokens, changed, t + 1)

            # The lower layers' outputs at t are read by those above, which is not in the state after it.
            if layer == layers - 1:
                expected = differences(loss, state[entry]).norm(dim=-1).mean().item()
                assert norms[t, depth * (layer + 1) - 1] == pytest.approx(expected, **TOLERANCE)


def test_norms_within_a_step_are_those_of_finite_differences():
    """From the state after each layer on, the equations of an RHN in numpy."""
    network, vocabulary = build("rhn", size=4, rhn_depth=3)
    tokens = tokens_of(vocabulary)[:, :1]
    norms, names, _ = gradient_flow(network, tokens)
    assert names == ("1", "2", "3")
    (cell,) = network.stack.cells
    p = {name: value.detach().numpy() for name, value in cell.named_parameters()}
    x = network.embed(tokens[:-1, 0]).detach().numpy()
    output = {name: getattr(network, name).detach().numpy() for name in ("weight_out", "bias_out")}
    target = network.symbol_of[tokens[-1, 0]].item()

    def loss(s, t, layer):
        for later in range(layer + 1, 3):
            a = s @ p[f"weight_s.{later}"] + p[f"bias_s.{later}"]
            s = naive_highway(a[:4], a[4:], s, 0.0, None)
        if t + 1 < len(x):
            _, (s,) = naive_rhn(p, cell.config, x[t + 1 :], (s,), None)
        logits = s @ output["weight_out"] + output["bias_out"]
        return np.log(np.exp(logits).sum()) - logits[target]

    layers = naive_rhn(p, cell.config, x, (np.zeros(4),), None, all_layers=True)[0].reshape(len(x), 3, 4)
    for t in range(len(x)):
        for layer in range(3):
            s = layers[t, layer]
            rows = [(loss(s + e, t, layer) - loss(s - e, t, layer)) / (2 * STEP) for e in STEP * np.eye(4)]
            assert norms[t, layer] == pytest.approx(np.linalg.norm(rows), **TOLERANCE)


def test_shares_of_an_lstm_are_those_of_its_equations():
    """Backwards by hand: c_t gets f of the next step through c, and o (1 - tanh^2) of h's gradient."""
    network, vocabulary = build("lstm", size=4)
    tokens = tokens_of(vocabulary)[:, :1]
    (cell,) = network.stack.cells
    T = len(tokens) - 1
    x = network.embed(tokens[:-1, 0]).detach()
    h, c, kept = torch.zeros(4).double(), torch.zeros(4).double(), []
    with torch.no_grad():
        for row in x:
            i, f, g, o = (row @ cell.weight_x + h @ cell.weight_h + cell.bias).chunk(4)
            i, f, g, o = i.sigmoid(), (f + cell.config.forget_bias).sigmoid(), g.tanh(), o.sigmoid()
            before, c = c, f * c + i * g
            h = o * c.tanh()
            kept.append((i, f, g, o, before, c))
        logits = h @ network.weight_out + network.bias_out
        p = logits.softmax(-1)
        p[network.symbol_of[tokens[-1, 0]]] -= 1
        to_h, through_c = network.weight_out @ p, torch.zeros(4).double()
        shares, norms = np.zeros(T), np.zeros(T)
        for t in reversed(range(T)):
            i, f, g, o, before, c = kept[t]
            norms[t] = to_h.norm()
            through_h = to_h * o * (1 - c.tanh() ** 2)
            shares[t] = through_h.norm() / (through_h.norm() + through_c.norm())
            to_c = through_h + through_c
            gates = [to_c * g * i * (1 - i), to_c * before * f * (1 - f), to_c * i * (1 - g**2)]
            gates.append(to_h * c.tanh() * o * (1 - o))
            to_h, through_c = cell.weight_h @ torch.cat(gates), to_c * f
    measured, _, measured_shares = gradient_flow(network, tokens)
    # Float64, ten steps.
    np.testing.assert_allclose(measured[:, 0], norms, rtol=1e-10)
    np.testing.assert_allclose(measured_shares, shares[:-1], rtol=1e-10)


def test_zoneout_of_c_leaves_no_c_that_h_and_the_next_step_read():
    network, vocabulary = build("lstm", zoneout_c=1e-9)
    assert gradient_flow(network, tokens_of(vocabulary))[2].shape == (0,)


@pytest.mark.parametrize("cell", ["nas", "projected_lstm"])
def test_other_cells_with_a_memory_have_shares(cell):
    network, vocabulary = build(cell, **({"memory_size": 5} if cell == "projected_lstm" else {}))
    shares = gradient_flow(network, tokens_of(vocabulary))[2]
    assert len(shares) and ((shares > 0) & (shares < 1)).all()


def test_h_detach_leaves_the_path_through_c_alone():
    network, vocabulary = build("hyperlstm", size=4, hyper_size=3, hyper_embed_size=2)
    tokens = tokens_of(vocabulary)
    norms, _, shares = gradient_flow(network, tokens, h_detach=1.0, draws=2)
    # Before the last step nothing comes through h; c has all of it.
    assert (norms[:-1] == 0).all() and norms[-1] > 0
    np.testing.assert_array_equal(shares, 0.0)
    half = gradient_flow(network, tokens, h_detach=0.5, draws=4)
    assert np.array_equal(half[0], gradient_flow(network, tokens, h_detach=0.5, draws=4)[0])
    full = gradient_flow(network, tokens)
    assert np.nanmean(half[2]) < np.nanmean(full[2])


def test_the_picture_leaves_zeros_out_and_dashes_the_start():
    norms = np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]])
    flows = [
        Flow("a, initial", norms * 0 + 1, ("1", "2"), np.zeros(0), True),
        Flow("a", norms, ("1", "2"), np.array([0.5, 0.2])),
    ]
    figure = draw_gradients(flows, shares=True)
    outside, within, share = figure.axes
    assert [line.get_linestyle() for line in outside.lines] == ["--", "-"]
    assert len({line.get_color() for line in outside.lines}) == 1
    assert outside.lines[1].get_ydata().tolist() == [0.5, 1.5, 2.5]
    assert within.lines[1].get_ydata().tolist() == [1.0, 2.0]
    assert share.lines[0].get_ydata().tolist() == [50, 20]


def test_pictures_of_checkpoints(tmp_path):
    data = tiny_char_lm.write_corpus(tmp_path)
    task = tiny_char_lm.build_task(data)
    tiny_char_lm.save(tiny_char_lm.build_model(task), data, tmp_path / "a.pt")
    line = [str(tmp_path / "a.pt"), "--lines", "3", "--steps", "6", "--output", str(tmp_path / "g.png")]
    plot.main(["gradients", *line, "--initial", "--shares"])
    arrays = np.load(tmp_path / "g.npz")
    assert arrays["a.norms"].shape == (6, 1) and arrays["a, initial.share_of_h"].shape == (5,)
    minimal = {"cell": "mingru", "hyper_size": None, "hyper_embed_size": None}
    tiny_char_lm.save(tiny_char_lm.build_model(task, **minimal), data, tmp_path / "min.pt", **minimal)
    for option, reason in ((["--shares"], "no model has a state"), (["--h-detach", "0.5"], "has no effect")):
        with pytest.raises(UsageError, match=reason):
            plot.main(["gradients", str(tmp_path / "min.pt"), *line[1:], *option])
    # The file's model was made with another seed than the initial one.
    assert (arrays["a.norms"] != arrays["a, initial.norms"]).any()
