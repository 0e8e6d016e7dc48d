"""Norms of weights and the rank of what a hypernetwork makes, against numpy and by what must hold."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import script_cli, tiny_char_lm
from helpers.tiny_reader import build

from rhhn_fairseq.cells import hyper
from rhhn_fairseq.cells.hyper_rnn import naive_scaling
from rhhn_fairseq.cells.rhn import naive_rhn
from rhhn_fairseq.data.text.words import prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.blocks import block_label, weight_blocks
from rhhn_fairseq.inspection.rank import (
    effective_rank,
    hyper_vectors,
    rank_of,
    variation_rank,
)
from rhhn_fairseq.inspection.tracing import trace

plot = script_cli.load("plot")
TEXT = "abba cd\nab < d"


def test_blocks_are_matrices_with_their_norms():
    network, _ = build("hyperrhn", hyper_size=3, rhn_depth=2)
    weights = network.state_dict()
    blocks = {block.name: block for block in weight_blocks(weights)}
    cell = "stack.cells.0."
    assert set(blocks) == {
        "weight_out", f"{cell}weight_x", f"{cell}weight_z.0", f"{cell}weight_z.1", f"{cell}weight_s.0",
        f"{cell}weight_s.1", f"{cell}hyper.weight_x", f"{cell}hyper.weight_s.0", f"{cell}hyper.weight_s.1",
    }  # fmt: skip
    matrix = weights[f"{cell}weight_z"][1].numpy()
    block = blocks[f"{cell}weight_z.1"]
    assert block.norm == pytest.approx(np.sqrt((matrix**2).sum()), rel=1e-12) and block.count == matrix.size
    assert block.root_mean_square == pytest.approx(np.sqrt((matrix**2).mean()), rel=1e-12)
    # The map to the vectors of further outer products is one matrix per depth.
    weights = build("hyperrhn", hyper_size=3, rhn_depth=2, hyper_rank=2)[0].state_dict()
    names = [block.name for block in weight_blocks(weights) if "rank" in block.name]
    assert names == [f"{cell}weight_rank.0", f"{cell}weight_rank.1"]
    # Matrices of a HyperLSTM's gates count one by one, and gains of its normalisation not at all.
    names = [block.name for block in weight_blocks(build("ln_hyperlstm", hyper_size=3)[0].state_dict())]
    assert sum("scaling.weight_d" in name for name in names) == 8
    assert not any("norm" in name or "bias" in name for name in names)


@pytest.mark.parametrize(
    "name, label",
    [
        ("stack.cells.1.weight_x", "layer 2: weight_x"),
        ("stack.backward_cells.0.weight_x", "layer 1, backward: weight_x"),
        ("encoder.stack.backward_cells.0.weight_x", "encoder.layer 1, backward: weight_x"),
    ],
)
def test_labels_name_the_layer(name, label):
    assert block_label(name) == label


def test_effective_rank_counts_equal_directions():
    draws = np.random.default_rng(1)
    basis = np.linalg.qr(draws.normal(size=(9, 9)))[0]
    for k in (1, 2, 5):
        assert effective_rank(basis[:, :k] @ basis[:k]) == pytest.approx(k, rel=1e-9)
    # Two directions of lengths 3 and 1: the entropy of 3/4 and 1/4.
    entropy = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert effective_rank(np.diag([3.0, 1.0])) == pytest.approx(np.exp(entropy))
    assert effective_rank(np.zeros((3, 2))) == 0.0


def test_what_does_not_change_has_rank_zero():
    vectors = torch.ones(5, 3) * torch.tensor([1.0, 2.0, 3.0])
    assert variation_rank(vectors) == 0.0
    assert variation_rank(vectors + torch.arange(5.0)[:, None]) == pytest.approx(1.0)
    # Rounding is no direction.
    rounded = vectors.double() * (1 + 1e-8 * torch.rand(5, 3, dtype=torch.float64))
    assert variation_rank(rounded) == 0.0 and variation_rank(rounded, tolerance=0.0) > 1.1


@pytest.mark.parametrize("state", ["current", "previous"])
def test_vectors_of_a_hyperlstm_are_those_of_its_equations(state):
    network, vocabulary = build("hyperlstm", hyper_size=3, hyper_embed_size=2, hyper_state=state)
    entries = prompt_indices(vocabulary, TEXT)
    (traced,), _ = trace(network, entries)
    p = {name: value.detach().numpy() for name, value in traced.cell.named_parameters()}
    vectors = hyper_vectors(traced)
    assert vectors["z"].shape == (4, len(entries), 2) and vectors["d"].shape == (4, len(entries), 6)
    assert rank_of("run", 1, [traced]).widths == {"z": 2, "d": 6}
    states = (traced.after if state == "current" else traced.before)[2]
    for t, e in enumerate(states.numpy()):
        for gate in range(4):
            d_h, _, _ = naive_scaling(p, "scaling.", e, gate, 4)
            # Float64, sums of three terms.
            np.testing.assert_allclose(vectors["d"][gate, t], d_h, rtol=1e-12)
            np.testing.assert_allclose(
                vectors["z"][gate, t].numpy() @ p["scaling.weight_d"][gate], d_h, rtol=1e-12
            )


def test_vectors_of_a_hyperrhn_are_those_of_its_equations():
    network, vocabulary = build("hyperrhn", hyper_size=3, rhn_depth=2, hyper_bias=1.0)
    entries = prompt_indices(vocabulary, TEXT)
    (traced,), _ = trace(network, entries)
    cell = traced.cell
    inner = {name: value.detach().numpy() for name, value in cell.hyper.named_parameters()}
    states, _ = naive_rhn(inner, cell.config.hyper(), traced.x_TC.numpy(), None, None, all_layers=True)
    for layer, z in enumerate(hyper_vectors(traced)["z"]):
        expected = states[:, 3 * layer : 3 * layer + 3] @ cell.weight_z[layer].detach().numpy()
        expected = expected + cell.bias_z[layer].detach().numpy() + 1.0
        np.testing.assert_allclose(z, expected, rtol=1e-12)


def test_vectors_of_the_cell_hyper_are_those_of_its_equations():
    network, vocabulary = build("hyper", hyper_size=3, hyper_embed_size=2, hyper_cell="gru")
    entries = prompt_indices(vocabulary, TEXT)
    (traced,), _ = trace(network, entries)
    cell = traced.cell
    p = {name: value.detach().numpy() for name, value in cell.scaling[0].named_parameters()}
    scaled = cell.scaling[0].scaled
    shifted = p["weight_z"].shape[1] // 2 - scaled
    vectors = hyper_vectors(traced)["d"]
    assert vectors.shape == (4, len(entries), 6)
    for t, e in enumerate(traced.after[len(cell.main.state_sizes)].numpy()):
        d, _ = hyper.naive_scaling(p, cell.config, e, scaled, shifted)
        # Float64, sums of three terms.
        np.testing.assert_allclose(vectors[:, t].flatten(), d[: 4 * 6], rtol=1e-12)


def test_the_published_start_keeps_rank_one_under_training():
    """Equal constants stay equal: the reason for ``broken_symmetry``."""
    ranks = {}
    for init in ("paper", "broken_symmetry"):
        network, vocabulary = build("hyperlstm", hyper_size=4, hyper_embed_size=3)
        torch.manual_seed(1)
        fresh = type(network.stack.cells[0])(
            type(network.stack.cells[0].config)(
                input_size=7, hidden_size=6, hyper_size=4, hyper_embed_size=3, hyper_init=init
            )
        ).double()
        network.stack.cells[0] = fresh
        entries = prompt_indices(vocabulary, TEXT * 3)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(20):
            y, _ = network.stack(network.embed(torch.tensor(entries[:-1])[:, None]))
            loss = torch.nn.functional.cross_entropy(network.output(y)[:, 0], torch.tensor(entries[1:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ranks[init] = rank_of("run", 20, trace(network, entries)[0]).ranks
    assert ranks["paper"] == pytest.approx({"z": 1.0, "d": 1.0}, abs=1e-4)
    assert ranks["broken_symmetry"]["z"] > 1.1


def test_a_model_without_a_hypernetwork_has_no_rank():
    network, vocabulary = build("lstm")
    with pytest.raises(UsageError, match="run: has no hypernetwork"):
        rank_of("run", 1, trace(network, prompt_indices(vocabulary, "ab"))[0])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of two tiny models that say that they come after 1 and 2 updates of one training."""
    folder = tmp_path_factory.mktemp("run")
    data = tiny_char_lm.write_corpus(folder)
    task, paths = tiny_char_lm.build_task(data), []
    for seed in (1, 2):
        model = tiny_char_lm.build_model(task, seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        paths.append(str(folder / f"checkpoint_1_{seed}.pt"))
        tiny_char_lm.save(model, data, paths[-1], updates=seed)
    return paths


def test_pictures_of_checkpoints(checkpoints, tmp_path, capsys):
    plot.main(["rank", *checkpoints, "--symbols", "30", "--output", str(tmp_path / "rank.png")])
    run = Path(checkpoints[0]).parent.name
    assert f"| {run} | 1 | " in capsys.readouterr().out
    arrays = np.load(tmp_path / "rank.npz")
    assert arrays[f"{run}.updates"].tolist() == [1, 2] and (arrays[f"{run}.d"] > 1.0).all()
    plot.main(["norms", *checkpoints, "--output", str(tmp_path / "norms.svg")])
    norms = np.load(tmp_path / "norms.npz")
    expected = torch.load(checkpoints[1], weights_only=True)["model"]["weight_out"].norm().item()
    place = norms["checkpoint_1_2.blocks"].tolist().index("weight_out")
    assert norms["checkpoint_1_2.norms"][place] == pytest.approx(expected, rel=1e-6)
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".npz"}
