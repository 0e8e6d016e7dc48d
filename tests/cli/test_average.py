"""Means of the weights of really trained checkpoints, and rhhn average."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import script_cli
from helpers.cli import fairseq_train
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq.cli import average as averaging
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import load_char_lm

script = script_cli.load("average")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Four epochs of a character language model; its best two are kept under names of their own."""
    save_dir = tmp_path_factory.mktemp("trained")
    model = ["--arch", "char_lm", "--cell", "ln_lstm", "--hidden-size", 12]
    task = ["--task", "char_lm", "--criterion", "char_cross_entropy", "--batch-size", 4]
    task += ["--tokens-per-sample", 20, "--optimizer", "adam", "--lr", 0.01, "--clip-norm", 1]
    kept = ["--keep-best-checkpoints", 2, "--save-interval-updates", 10, "--save-interval", 1]
    kept += ["--max-epoch", 4]
    fairseq_train([corpus, *task, *model, *kept, "--cpu", "--save-dir", save_dir])
    return save_dir


def weights(path) -> dict:
    return torch.load(path, weights_only=True)["model"]


def run(capsys, *arguments, status=0) -> str:
    capsys.readouterr()
    assert cli.run(lambda: script.main([str(argument) for argument in arguments])) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err if status else captured.out


def check_mean(mean: dict, checkpoints: list[dict]) -> None:
    assert mean.keys() == checkpoints[0].keys()
    for name, tensor in mean.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, checkpoints[-1][name]), name
            continue
        expected = sum(one[name].double() for one in checkpoints) / len(checkpoints)
        assert tensor.dtype == checkpoints[0][name].dtype
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


def test_the_last_by_epoch_and_by_update(trained, tmp_path, capsys):
    output = tmp_path / "average.pt"
    assert f"written: {output}" in run(capsys, trained, "--last", 3, "--output", output)
    check_mean(weights(output), [weights(trained / f"checkpoint{epoch}.pt") for epoch in (2, 3, 4)])
    updates = averaging.last_checkpoints(trained, 2, "update")
    every = sorted(trained.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
    assert updates == every[-2:] and len(every) > 2
    run(capsys, trained, "--last", 2, "--by", "update", "--output", output)
    check_mean(weights(output), [weights(path) for path in updates])
    assert [path.name for path in tmp_path.iterdir()] == ["average.pt"]
    assert "--last 9" in run(capsys, trained, "--last", 9, "--output", output, status=1)


def test_the_best_by_the_stored_metric(trained, tmp_path, capsys):
    by_epoch = {path: averaging.read_score(averaging.load(path)) for path in trained.glob("checkpoint?.pt")}
    by_update = {
        path: averaging.read_score(averaging.load(path)) for path in trained.glob("checkpoint_?_*.pt")
    }
    scores = sorted(score.value for score in {**by_epoch, **by_update}.values())
    best = averaging.best_checkpoints(trained, 2)
    assert [averaging.read_score(averaging.load(path)).value for path in best] == scores[:2]
    run(capsys, trained, "--best", 2, "--metric", "loss", "--output", tmp_path / "average.pt")
    check_mean(weights(tmp_path / "average.pt"), [weights(path) for path in best])
    assert "with a stored bleu" in run(
        capsys, trained, "--best", 1, "--metric", "bleu", "--output", tmp_path / "average.pt", status=1
    )
    # Where only the named ones are left, they are the same two.
    named = tmp_path / "named"
    named.mkdir()
    for path in trained.glob("checkpoint.best_*.pt"):
        shutil.copy(path, named)
    again = averaging.best_checkpoints(named, 2)
    assert len(again) == 2
    for one, other in zip(again, best, strict=True):
        assert all(torch.equal(weights(one)[name], tensor) for name, tensor in weights(other).items())
    # After --reset-optimizer, updates begin again.
    anew = tmp_path / "anew"
    anew.mkdir()
    for number, path in enumerate(sorted(trained.glob("checkpoint?.pt"))):
        state = torch.load(path, weights_only=True)
        state["optimizer_history"][-1]["num_updates"] = 10
        state["extra_state"]["val_loss"] = 9.0 - number
        torch.save(state, anew / path.name)
    assert [path.stem for path in averaging.best_checkpoints(anew, 2)] == ["checkpoint4", "checkpoint3"]
    # A metric of which more is better.
    for number, value in enumerate((10.0, 30.0, 20.0), start=1):
        state = torch.load(trained / f"checkpoint{number}.pt", weights_only=True)
        state["extra_state"]["val_loss"] = value
        state["cfg"]["checkpoint"] |= {
            "best_checkpoint_metric": "bleu",
            "maximize_best_checkpoint_metric": True,
        }
        (tmp_path / "bleu").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "bleu" / f"checkpoint{number}.pt")
    found = averaging.best_checkpoints(tmp_path / "bleu", 2)
    assert [path.name for path in found] == ["checkpoint2.pt", "checkpoint3.pt"]


def test_the_mean_that_training_keeps(trained, tmp_path, capsys):
    def with_ema(state):
        # As --store-ema leaves it.
        state["extra_state"]["ema"] = {
            name: tensor / 2 if tensor.is_floating_point() else tensor
            for name, tensor in state["model"].items()
        }

    paths = [
        written(tmp_path / f"{epoch}.pt", with_ema, trained / f"checkpoint{epoch}.pt") for epoch in (3, 4)
    ]
    kept = [torch.load(path, weights_only=True)["extra_state"]["ema"] for path in paths]
    output = tmp_path / "average.pt"
    run(capsys, *paths, "--ema", "--output", output)
    check_mean(weights(output), kept)
    run(capsys, paths[1], "--ema", "--output", output)
    check_mean(weights(output), kept[1:])
    # Before gains were vectors named *_norm_weight.
    old = {f"gate_{new}": f"gate_norm_{name}" for new, name in (("gain", "weight"), ("shift", "bias"))}

    def with_old_names(state):
        with_ema(state)
        for table in (state["model"], state["extra_state"]["ema"]):
            for before, name in old.items():
                table[f"stack.cells.0.{before}"] = table.pop(f"stack.cells.0.{name}").view(4, -1)

    older = written(tmp_path / "older.pt", with_old_names, trained / "checkpoint3.pt")
    run(capsys, older, paths[1], "--ema", "--output", output)
    check_mean(weights(output), kept)
    assert "holds no such weights; train with --store-ema" in run(
        capsys, output, "--ema", "--output", tmp_path / "other.pt", status=1
    )
    assert "is the file" in run(capsys, paths[1], output, "--output", output, status=1)


def test_the_result_is_a_model(trained, corpus, tmp_path, capsys):
    output = tmp_path / "average.pt"
    run(capsys, trained / "checkpoint4.pt", trained / "checkpoint3.pt", "--output", output)
    state = torch.load(output, weights_only=True)
    newest = torch.load(trained / "checkpoint4.pt", weights_only=True)
    assert averaging.updates_of(state) == averaging.updates_of(newest)
    assert state["cfg"] == newest["cfg"] and state["last_optimizer_state"] is None
    assert len(state["extra_state"]["averaged"]) == 2 and state["extra_state"]["val_loss"] is None
    assert output.stat().st_size < (trained / "checkpoint4.pt").stat().st_size * 0.7
    model, _ = load_char_lm(str(output))
    check_mean(model.state_dict(), [weights(trained / f"checkpoint{epoch}.pt") for epoch in (3, 4)])


def written(path, change, source) -> Path:
    state = torch.load(source, weights_only=True)
    change(state)
    torch.save(state, path)
    return path


def test_what_cannot_be_averaged(trained, tmp_path, capsys):
    good, output = trained / "checkpoint4.pt", tmp_path / "average.pt"
    name = next(name for name, tensor in weights(good).items() if tensor.is_floating_point())

    def refused(change, *options) -> str:
        return run(
            capsys, good, written(tmp_path / "other.pt", change, good), *options, "--output", output, status=1
        )

    def wider(state):
        state["model"][name] = state["model"][name].new_zeros(7, 7)

    assert f"differ in {name} or its shape" in refused(wider)
    assert "differ in more or" in refused(lambda state: state["model"].update(more=torch.zeros(1)))
    assert f"differ in {name} or" in refused(lambda state: state["model"].pop(name))
    assert f"{name} holds NaN" in refused(lambda state: state["model"][name].fill_(float("nan")))
    assert "is given twice" in run(capsys, good, good, "--output", output, status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["other.pt"]


def test_integers_and_shared_tables(trained, tmp_path):
    def with_buffers(count, shared):
        def change(state):
            state["model"].update(
                steps=torch.tensor(count),
                flags=torch.tensor([True]),
                one=shared,
                other=shared,
                empty=torch.ones(0),
            )
            state["optimizer_history"][-1]["num_updates"] = count

        return change

    good = trained / "checkpoint4.pt"
    paths = [
        written(tmp_path / f"{count}.pt", with_buffers(count, torch.full((1000,), float(count))), good)
        for count in (9, 4)
    ]
    state = averaging.average(paths)
    assert state["model"]["steps"] == 9 and state["model"]["flags"].tolist() == [True]
    assert torch.equal(state["model"]["one"], torch.full((1000,), 6.5))
    assert state["model"]["one"].data_ptr() == state["model"]["other"].data_ptr()
    # Half precision is averaged in full.
    for path in paths:
        written(path, lambda state: state["model"].update(one=state["model"]["one"].half() * 4000), path)
    assert averaging.average(paths)["model"]["one"][0] == 26000
    for path in paths:
        change = with_buffers(int(path.stem), torch.zeros(3))
        written(path, change, path)
    for number, path in enumerate(paths):
        state = torch.load(path, weights_only=True)
        torch.save(state | {"model": state["model"] | {"pieces_sha256": torch.tensor([number])}}, path)
    with pytest.raises(UsageError, match="trained on different data: their pieces_sha256 differ"):
        averaging.average(paths)
