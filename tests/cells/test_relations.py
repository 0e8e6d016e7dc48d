"""Cells that equal others, or torch's own, with matching options."""

import pytest
import torch
from helpers.fused_cells import GATED_NOISE, RHN_NOISE
from helpers.small_cells import C, H, build, draw_inputs, draw_noise

from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.errors import UsageError


def test_a_mogrifier_without_rounds_is_the_lstm():
    cell, lstm = build("mogrifier_lstm", {"rounds": 0}), build("lstm", {})
    lstm.load_state_dict(cell.state_dict())
    x, state = draw_inputs(cell, 6, 3)
    torch.testing.assert_close(cell(x, state)[0], lstm(x, state)[0], rtol=0, atol=1e-14)


def test_hyperlstm_of_higher_rank_starts_as_that_of_rank_1():
    torch.manual_seed(0)
    one, three = (
        build_cell("hyperlstm", C, H, hyper_size=4),
        build_cell("hyperlstm", C, H, hyper_size=4, hyper_rank=3),
    )
    three.load_state_dict(one.state_dict(), strict=False)
    x, state = draw_inputs(one, 6, 3, dtype=torch.float32)
    torch.testing.assert_close(three(x, state)[0], one(x, state)[0], rtol=0, atol=1e-6)
    three(x, state)[0].square().sum().backward()
    assert three.bias_rank.grad[2 * H :].abs().min() > 0


def test_a_grid_without_its_connections_is_the_rhn():
    grid, rhn = build("grid_rhn", {"rhn_depth": 3}), build("rhn", {"rhn_depth": 3})
    with torch.no_grad():
        for weight in grid.weight_grid:
            weight.zero_()
    rhn.load_state_dict({name: value for name, value in grid.state_dict().items() if "grid" not in name})
    x, state = draw_inputs(grid, 6, 3)
    torch.testing.assert_close(grid(x, state)[0], rhn(x, state[:1])[0], rtol=0, atol=1e-14)


LAYERED = dict(hyper_input="x", hyper_map="direct", hyper_output="layers", hyper_start=0.0)


def _renamed(parameters):
    """The parameters of a cell of the papers under the names that ``hyper`` has for them."""
    names = {"weight_hyper": "weight_seen.0", "scaling.bias": "main.bias"}
    renamed = {}
    for name, value in parameters.items():
        if name in ("weight_z", "bias_z"):
            # The HyperRHN has one parameter for the maps of all layers.
            renamed |= {f"scaling.{layer}.{name[:-1]}d": own for layer, own in enumerate(value)}
        elif name in names:
            renamed[names[name]] = value.flatten() if "bias" in name else value
        elif name.startswith(("hyper.", "scaling.")):
            renamed[name.replace("scaling.", "scaling.0.")] = value
        else:
            renamed[f"main.{name}"] = value
    return renamed


@pytest.mark.parametrize(
    "name, options, own",
    [
        ("hyperlstm", GATED_NOISE, dict(main_cell="lstm", hyper_cell="lstm")),
        ("ln_hyperlstm", GATED_NOISE, dict(main_cell="ln_lstm", hyper_cell="ln_lstm")),
        ("hyperrhn", RHN_NOISE | dict(rhn_depth=2), LAYERED | dict(hyper_dropout=0.3)),
        ("hyperrhn", dict(rhn_depth=2, first_step="skip"), LAYERED),
    ],
)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_hyper_equals_the_hypernetworks_of_the_papers(name, options, own, training):
    if name == "hyperrhn":
        own = own | dict(main_cell="rhn", hyper_cell="rhn")
    embeds = {"hyper_embed_size": 2} if name != "hyperrhn" else {}
    theirs = build(name, options | embeds | dict(hyper_size=3)).train(training)
    cell = build("hyper", options | embeds | own | dict(hyper_size=3)).train(training)
    cell.load_state_dict(_renamed(theirs.state_dict()))
    x, state = draw_inputs(cell, 6, 3)
    noise = draw_noise(cell, 6, 3) if training else None
    for start in (state, None):
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, final = cell(inputs[0], start, noise=noise)
        y_theirs, final_theirs = theirs(inputs[1], start, noise=noise)
        torch.testing.assert_close(y, y_theirs, rtol=0, atol=1e-12)
        for one, other in zip(final, final_theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(y.square().sum(), inputs[0])
        (gradient_theirs,) = torch.autograd.grad(y_theirs.square().sum(), inputs[1])
        torch.testing.assert_close(gradient, gradient_theirs, rtol=0, atol=1e-12)


def test_any_cell_is_a_hypernetwork():
    x = torch.randn(3, 2, C)
    for name in CELLS.keys() - {"hyper"}:
        own = dict(hyper_cell=name, hyper_size=2, main_cell="rhn")
        assert build_cell("hyper", C, H, hyper_input="x", **own)(x)[0].isfinite().all(), name
        if name != "mogrifier_lstm":
            assert build_cell("hyper", C, H, **own)(x)[0].isfinite().all(), name
    with pytest.raises(UsageError, match="hyper_cell='mogrifier_lstm' is not"):
        build_cell("hyper", C, H, hyper_cell="mogrifier_lstm")


def test_hyper_refuses_cells_and_options_that_do_not_fit():
    valid = "elman, grid_rhn, gru, irnn, jordan, ln_gru, ln_lstm, lstm, mi_lstm, mlstm, nas, rhn"
    for cell in ("mingru", "hyperlstm", "hyperrnn", "hyper", "lstn"):
        with pytest.raises(UsageError, match=f"main_cell='{cell}' is not .* choose from {valid}$"):
            build_cell("hyper", C, H, main_cell=cell)
    with pytest.raises(UsageError, match="hyper_cell='hyper' is not .* choose from elman, grid_rhn"):
        build_cell("hyper", C, H, hyper_cell="hyper")
    with pytest.raises(UsageError, match="zoneout_c=0.1 is not an option of the main cell gru"):
        build_cell("hyper", C, H, main_cell="gru", zoneout_c=0.1)
    with pytest.raises(UsageError, match="hyper_dropout=0.1, but the cell elman has no recurrent dropout"):
        build_cell("hyper", C, H, hyper_cell="elman", hyper_dropout=0.1)
    with pytest.raises(UsageError, match="hyper_output='layers' with hyper_cell='gru' and main_cell='rhn'"):
        build_cell("hyper", C, H, main_cell="rhn", hyper_cell="gru", hyper_output="layers")
