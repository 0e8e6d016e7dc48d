"""--log-dynamics: what it logs, and that it changes nothing."""

import numpy as np
import pytest
import torch
from helpers.in_process import CHAR_LM, train
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.ops import backends
from rhhn_fairseq.tasks.dynamics import hyper_figures, outer_cells, trace_cells

LN_HYPERLSTM = ["--cell", "ln_hyperlstm", "--hyper-size", 4, "--hyper-embed-size", 3]
COPYING = ["--task", "synthetic", "--arch", "lstm_copying", "--hidden-size", 8, "--problem", "copying"]
COPYING += ["--length", 5, "--epoch-updates", 6, "--valid-examples", 10, "--criterion", "problem_loss"]
COPYING += ["--optimizer", "adam", "--lr", 0.01, "--cpu", "--batch-size", 5, "--disable-validation"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _char_lm(corpus, save_dir, *options):
    return train(corpus, *CHAR_LM, "--save-dir", save_dir, "--max-update", 6, *options)


def _logged(record) -> set[str]:
    names = ("grad_norm.", "update_norm.", "rank_", "weight_change")
    return {name for name in record if name.startswith(names)}


def test_every_so_many_updates_have_the_figures_and_the_training_is_the_same(corpus, tmp_path):
    plain = _char_lm(corpus, tmp_path / "plain", *LN_HYPERLSTM)
    log = _char_lm(corpus, tmp_path / "logged", *LN_HYPERLSTM, "--log-dynamics", 3)
    assert log.losses == plain.losses
    paths = (tmp_path / run / "checkpoint_last.pt" for run in ("plain", "logged"))
    first, second = (torch.load(path)["model"] for path in paths)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(map(_logged, plain.updates))
    assert [bool(_logged(record)) for record in log.updates] == [False, False, True] * 2
    record = log.updates[2]
    blocks = ("weight_x", "weight_h", "weight_hyper", "hyper.weight_h", "scaling.weight_d")
    for block in blocks:
        for kind in ("grad_norm", "update_norm"):
            assert float(record[f"{kind}.stack.cells.0.{block}"]) > 0
    assert not any("bias" in name or "shift" in name for name in _logged(record))
    # The norm of the whole gradient, which fairseq logs before it is clipped to 1.
    norms = [float(value) for name, value in record.items() if name.startswith("grad_norm.")]
    assert np.linalg.norm(norms) <= min(1.0, float(record["gnorm"])) + 1e-3
    assert 1 <= float(record["rank_z"]) <= 3 and 1 <= float(record["rank_d"]) <= 8
    assert float(record["weight_change"]) > 0


def test_bfloat16_logs_the_gradient_that_the_optimizer_receives(corpus, tmp_path):
    log = _char_lm(corpus, tmp_path, "--bf16", "--clip-norm", 0.01, "--log-dynamics", 1)
    for record in log.updates:
        norms = [float(value) for name, value in record.items() if name.startswith("grad_norm.")]
        # The clipped norm includes the biases; bfloat16 has 8 bits.
        assert 0.002 < np.linalg.norm(norms) <= 0.0101


def test_other_tasks_log_them(tmp_path):
    log = train(*COPYING, "--save-dir", tmp_path, "--max-update", 2, "--log-dynamics", 2)
    names = {f"{kind}.stack.cells.0.weight_h" for kind in ("grad_norm", "update_norm")}
    assert names <= _logged(log.updates[1])


def test_weight_change_is_that_of_the_matrices():
    torch.manual_seed(0)
    cell = build_cell("hyperlstm", 3, 4, hyper_size=3, hyper_embed_size=2).double()
    for parameter in cell.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(6, 1, 3).double()
    assert outer_cells(torch.nn.Sequential(cell)) == [cell]
    state, matrices = None, []
    for x_t in x:
        state = cell(x_t[None], state)[1]
        d_4H = cell.scaling(state[2])[0][:, 0]
        matrices.append((cell.weight_h.unflatten(1, (4, 4)) * d_4H).detach())
    changes = torch.stack(matrices).diff(dim=0).pow(2).sum((1, 3)).sqrt()
    expected = changes.mean().item()
    before = dict(backends.RUNNING)
    figures = hyper_figures(trace_cells({cell: x}))
    assert dict(backends.RUNNING) == before
    assert figures["weight_change"] == pytest.approx(expected, rel=1e-12)
    assert set(figures) == {"weight_change", "rank_z", "rank_d"}
