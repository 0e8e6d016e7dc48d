"""Going on with a training: with other workers, and from the checkpoint that is right."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig, EMAConfig
from fairseq.models.ema.ema import EMA
from helpers import tiny_translation
from helpers.cli import HANGS, fairseq_train, json_log, lstm, model_of
from helpers.in_process import LOG, char_lm, train
from helpers.lock_holder import holder

from rhhn_fairseq.cli.average import average
from rhhn_fairseq.compat import resume
from rhhn_fairseq.errors import UsageError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """A run into its second epoch that is not interrupted: its log and its directory."""
    save_dir = tmp_path_factory.mktemp("whole")
    log = train(*char_lm(corpus, save_dir, "--max-update", 30, "--save-interval-updates", 13))
    assert len(log.losses) == 30 and float(log.updates[-1]["epoch"]) == 2
    return log, save_dir


def same_parameters(one, other) -> bool:
    expected, found = model_of(one), model_of(other)
    return expected.keys() == found.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def as_of_two_workers(path, place):
    """Rewrites a checkpoint of one worker with --update-freq 2 as two workers would have saved it."""
    state = torch.load(path, weights_only=True)
    state["cfg"]["distributed_training"]["distributed_world_size"] = 2
    state["extra_state"]["train_iterator"]["iterations_in_epoch"] //= 2
    torch.save(state, place)


def test_one_worker_goes_on_where_two_stopped(corpus, uninterrupted, tmp_path):
    """The lanes are the same, so the losses are."""
    saved = tmp_path / "two.pt"
    as_of_two_workers(uninterrupted[1] / "checkpoint_1_13.pt", saved)
    rest = train(*char_lm(corpus, tmp_path / "rest", "--max-update", 30, "--restore-file", saved))
    assert rest.losses == uninterrupted[0].losses[13:]
    assert same_parameters(uninterrupted[1], tmp_path / "rest")


@pytest.mark.parametrize("schedule", ["polynomial_decay", "reduce_lr_on_plateau"])
def test_a_training_goes_on_with_another_schedule(corpus, uninterrupted, tmp_path, schedule):
    """The one before, "fixed", saves no best figure; in fairseq the others then end in a KeyError."""
    saved = uninterrupted[1] / "checkpoint_1_13.pt"
    options = ["--lr-scheduler", schedule, "--max-epoch", 2, "--restore-file", saved]
    options += ["--total-num-update", 40] if schedule == "polynomial_decay" else []
    line = [option for option in char_lm(corpus, tmp_path, *options) if option != "--disable-validation"]
    log = train(*line)
    rates = [float(update["lr"]) for update in log.updates]
    left = [max(0.0, 1 - update / 40) for update in range(14, 14 + len(rates))]
    expected = left if schedule == "polynomial_decay" else [1.0] * len(rates)
    assert rates == pytest.approx([0.01 * share for share in expected], abs=2e-6)
    assert len(rates) > 20


def test_an_update_that_is_cut_is_begun_again(corpus, uninterrupted, tmp_path):
    """13 updates of 2 batches are no whole number of updates of 4."""
    options = ["--batching", "windows", "--max-epoch", 1, "--save-interval-updates", 13]
    train(*char_lm(corpus, tmp_path, *options, "--max-update", 13))
    log = train(*char_lm(corpus, tmp_path, *options, "--update-freq", 4))
    (warning,) = [message for message in log.messages if "trained on again" in message]
    assert "its last 2 batches" in warning


def test_batches_grouped_by_the_number_of_workers_are_refused(corpus, uninterrupted, tmp_path):
    saved = tmp_path / "two.pt"
    as_of_two_workers(uninterrupted[1] / "checkpoint_1_13.pt", saved)
    options = ["--max-epoch", 2, "--restore-file", saved, "--grouped-shuffling"]
    with pytest.raises(UsageError, match="by 2 worker.s., this run has 1: --grouped-shuffling"):
        train(*char_lm(corpus, tmp_path / "rest", *options))
    assert train(*char_lm(corpus, tmp_path / "rest", *options, "--reset-dataloader")).updates
    anew = ["--finetune-from-model", saved, "--grouped-shuffling", "--max-update", 1]
    assert train(*char_lm(corpus, tmp_path / "tuned", *anew)).updates


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
@pytest.mark.parametrize("task", ["char_lm", "language_modeling"])
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_resuming_with_other_workers(corpus, tiny_corpus, tmp_path, task, before, after):
    """Two workers to one with --update-freq 2, and back, as real processes."""

    def arguments(save_dir, workers, *more):
        frequency = ["--update-freq", 2 // workers, "--no-epoch-checkpoints", *more]
        if task == "char_lm":
            return [*char_lm(corpus, save_dir, *LOG), *frequency]
        return lstm(tiny_corpus, save_dir, "--clip-norm", 1, "--cpu", "--disable-validation", *frequency)

    def losses(result):
        return [record["loss"] for record in json_log(result.stdout) if record["tag"] == "train_inner"]

    end = ["--max-update", 12, "--save-interval-updates", 5]
    expected = fairseq_train(arguments(tmp_path / "whole", before, *end), workers=before)
    fairseq_train(arguments(tmp_path / "cut", before, "--max-update", 5), workers=before)
    rest = fairseq_train(arguments(tmp_path / "cut", after, *end), workers=after)
    assert len(losses(expected)) == 12
    assert losses(rest) == losses(expected)[5:]


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def zeros(path):
    """What a power failure can leave: blocks that were never written."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(512) + content[middle + 512 :])


@pytest.fixture
def stopped(uninterrupted, tmp_path):
    """A directory with checkpoints after 13, 26 and 30 updates."""
    for number, path in enumerate(sorted(uninterrupted[1].iterdir())):
        copied = shutil.copy(path, tmp_path)
        os.utime(copied, (number, number))
    assert {"checkpoint_1_13.pt", "checkpoint_last.pt"} < {path.name for path in tmp_path.iterdir()}
    return tmp_path


@pytest.mark.parametrize("spoil", [cut, zeros])
def test_a_damaged_last_checkpoint_is_replaced_by_the_newest_good_one(corpus, uninterrupted, stopped, spoil):
    """The newest name is damaged as well, and the oldest file the youngest."""
    older = sorted(stopped.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
    names = [path.name for path in older]
    assert names == ["checkpoint_1_13.pt", "checkpoint_2_26.pt"]
    (stopped / "checkpoint_best.pt").write_bytes(b"PK")
    os.utime(older[0])
    spoil(stopped / "checkpoint_last.pt")
    log = train(*char_lm(corpus, stopped, "--max-update", 30))
    (warning,) = [message for message in log.messages if "going on from" in message]
    assert str(stopped / "checkpoint_last.pt") in warning and str(stopped / "checkpoint_2_26.pt") in warning
    assert log.losses == uninterrupted[0].losses[26:]
    assert same_parameters(uninterrupted[1], stopped)


def test_a_missing_last_checkpoint_is_no_start_from_scratch(corpus, uninterrupted, stopped):
    (stopped / "checkpoint_last.pt").unlink()
    newest = stopped / "checkpoint_2_26.pt"
    with pytest.raises(UsageError, match=rf"last.pt: is missing .* --restore-file {newest}$"):
        train(*char_lm(corpus, stopped, "--max-update", 30))
    assert not (stopped / ".training.lock").exists()
    log = train(*char_lm(corpus, stopped, "--max-update", 30, "--restore-file", newest))
    assert log.losses == uninterrupted[0].losses[26:]


def test_a_hostile_last_checkpoint_is_not_passed_over(corpus, stopped):
    torch.save({"model": {}, "call": Path.cwd}, stopped / "checkpoint_last.pt")
    with pytest.raises(UsageError, match="checkpoint_last.pt is refused: it would load"):
        train(*char_lm(corpus, stopped, "--max-update", 30))


def test_two_trainings_in_one_directory(corpus, tmp_path):
    """The second is refused before it has read or written a checkpoint."""
    with holder(tmp_path / ".training.lock"):
        with pytest.raises(UsageError, match=rf"--save-dir {tmp_path}: is in use by another training"):
            train(*char_lm(corpus, tmp_path, "--max-update", 1))
        assert [path.name for path in tmp_path.iterdir()] == [".training.lock"]
        train(*char_lm(corpus, tmp_path, "--max-update", 1, "--no-save"))
    (tmp_path / ".checkpoint_1_1.pt.0123abcd.tmp").write_bytes(b"cut short by a kill")
    train(*char_lm(corpus, tmp_path, "--max-update", 1))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]


# Nothing improves after the first validation.
STUCK = ["--optimizer", "sgd", "--lr", 1e-30, "--patience", 3, "--max-epoch", 9]


@pytest.mark.parametrize(
    "epochs, reset, last",
    [(2, (), 4), pytest.param(2, ("--reset-meters",), 6, marks=pytest.mark.slow)],
)
def test_patience_goes_on_counting(corpus, tmp_path, epochs, reset, last):
    """The count of another training of this process is not taken over either."""
    line = [option for option in char_lm(corpus, tmp_path, *STUCK) if option != "--disable-validation"]
    train(*line, "--max-epoch", epochs)
    log = train(*line, *reset)
    assert sum("early stop" in message for message in log.messages) == 1
    assert torch.load(tmp_path / "checkpoint_last.pt")["extra_state"]["train_iterator"]["epoch"] == last + 1


@pytest.mark.slow
def test_a_second_training_has_a_best_score_of_its_own(corpus, tmp_path):
    """After a better training of the same process, too, the best checkpoint is written."""
    for name, rate in (("good", 0.01), ("bad", 1e-30)):
        line = char_lm(corpus, tmp_path / name, "--lr", rate, "--max-epoch", 1)
        train(*[option for option in line if option != "--disable-validation"])
        assert (tmp_path / name / "checkpoint_best.pt").is_file()


@pytest.mark.slow
def test_a_best_figure_of_another_metric_is_not_compared(corpus, tmp_path):
    """A perplexity above the loss before it is no reason to lower the rate or to keep the best checkpoint."""
    options = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", 0.5, "--lr", 0.01, "--max-epoch"]
    line = [option for option in char_lm(corpus, tmp_path, *options, 1) if option != "--disable-validation"]
    train(*line)
    log = train(*line, "--max-epoch", 3, "--best-checkpoint-metric", "ppl", "--patience", 1)
    assert any(message.startswith("the best loss in ") for message in log.messages)
    assert {update["lr"] for update in log.updates} == {"0.01"}
    best, last = (torch.load(tmp_path / f"checkpoint_{name}.pt")["extra_state"] for name in ("best", "last"))
    assert best["train_iterator"]["epoch"] == last["train_iterator"]["epoch"] == 4
    assert best["best"] == best["val_loss"] == last["early_stop"]["best"] > 5


@pytest.mark.slow
def test_a_plateau_is_counted_across_restarts(corpus, tmp_path):
    """Nothing improves enough, so the rate falls after every third validation."""
    options = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-patience", 1, "--lr-threshold", 10]
    options += ["--lr-shrink", 0.5, "--max-epoch", 4]
    line = [
        option for option in char_lm(corpus, tmp_path / "one", *options) if option != "--disable-validation"
    ]
    rates = {float(update["epoch"]): update["lr"] for update in train(*line).updates}
    line = [str(tmp_path / "many") if option == tmp_path / "one" else option for option in line]
    again = {}
    for epochs in (1, 2, 4):
        log = train(*line, "--max-epoch", epochs)
        again |= {float(update["epoch"]): update["lr"] for update in log.updates}
    assert again == rates and len(set(rates.values())) > 1


@pytest.mark.slow
def test_updates_are_counted_without_the_optimizer_s_state(corpus, tmp_path):
    line = char_lm(corpus, tmp_path, "--no-save-optimizer-state")
    train(*line, "--max-update", 4)
    log = train(*line, "--max-update", 6)
    assert [update["num_updates"] for update in log.updates] == ["5", "6"]
    assert any("has no state of the optimizer, which begins anew" in message for message in log.messages)
    assert not train(*line, "--max-update", 6).updates
    log = train(*line, "--max-update", 2, "--reset-optimizer")
    assert [update["num_updates"] for update in log.updates] == ["1", "2"]


def test_the_best_checkpoints_of_a_negative_figure(tmp_path):
    names = [f"checkpoint.best_loss_{value}.pt" for value in ("3.1000", "-2.5810", "-12.9280")]
    for name in names:
        (tmp_path / name).touch()
    pattern = r"checkpoint\.best_{}_(\d+\.?\d*){}\.pt".format("loss", "")
    paths = checkpoint_utils.checkpoint_paths(str(tmp_path), pattern=pattern)
    assert [Path(path).name for path in paths] == names


def test_the_clock_goes_on(corpus, tmp_path):
    """From the checkpoint's time, but from 0 where another model is fine-tuned."""
    train(*char_lm(corpus, tmp_path / "first", "--max-update", 5))
    last = tmp_path / "first" / "checkpoint_last.pt"
    state = torch.load(last)
    state["extra_state"]["previous_training_time"] = 7200.0
    torch.save(state, last)
    for name, option, earlier in (("on", "--restore-file", 7200), ("fine", "--finetune-from-model", 0)):
        limits = ["--max-update", 8, "--stop-time-hours", 3 if earlier else 1]
        log = train(*char_lm(corpus, tmp_path / name, *limits, option, last))
        assert log.updates
        assert all(earlier <= float(update["wall"]) < earlier + 600 for update in log.updates)


@pytest.mark.parametrize(
    "limit, reason",
    [
        (("--max-update", 5), "--max-update 5"),
        pytest.param(STUCK, "--patience 3", marks=pytest.mark.slow),
    ],
)
def test_a_complete_training_makes_no_update(corpus, tmp_path, limit, reason):
    """The checkpoint keeps its time, and a later limit trains on."""
    line = [option for option in char_lm(corpus, tmp_path, *limit) if option != "--disable-validation"]
    assert train(*line).updates
    saved = (tmp_path / "checkpoint_last.pt").stat().st_mtime_ns
    log = train(*line)
    assert not log.updates
    assert (tmp_path / "checkpoint_last.pt").stat().st_mtime_ns == saved
    assert (
        [message for message in log.messages if message.startswith("training is complete at update")]
        == [message for message in log.messages if message.endswith(f": {reason}")]
        != []
    )
    further = ["--max-update", 7] if "--max-update" in limit else ["--max-epoch", 20, "--patience", 5]
    assert train(*line, *further, "--stop-time-hours", 0).updates


@pytest.mark.parametrize(
    "source, before",
    [
        ("--restore-file", ()),
        ("--finetune-from-model", ()),
        ("--finetune-from-model", ("--store-ema", "--ema-decay", 1)),
    ],
)
def test_an_average_begins_with_a_checkpoint(corpus, tmp_path, source, before):
    """If that has none, or is only the start of another training. A decay of 1 leaves it as it begins."""
    train(*char_lm(corpus, tmp_path / "plain", "--max-update", 3, *before))
    saved = tmp_path / "plain" / "checkpoint_last.pt"
    average = ["--store-ema", "--ema-decay", 1, source, saved, "--max-update", 6]
    log = train(*char_lm(corpus, tmp_path / "averaged", *average))
    assert f"the average of the weights begins with those of {saved}" in log.messages
    last = torch.load(tmp_path / "averaged" / "checkpoint_last.pt", weights_only=True)
    expected = model_of(tmp_path / "plain")
    assert all(torch.equal(value, expected[key]) for key, value in last["extra_state"]["ema"].items())
    assert not all(torch.equal(value, expected[key]) for key, value in last["model"].items())


@pytest.mark.slow
def test_an_average_of_every_third_update_goes_on(corpus, tmp_path):
    average = ["--store-ema", "--ema-decay", 0.5, "--ema-update-freq", 3, "--max-update"]
    train(*char_lm(corpus, tmp_path / "whole", *average, 7))
    for updates in (4, 7):
        train(*char_lm(corpus, tmp_path / "stopped", *average, updates))
    whole, stopped = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["extra_state"]["ema"]
        for name in ("whole", "stopped")
    )
    assert all(torch.equal(stopped[key], value) for key, value in whole.items())


@pytest.mark.parametrize("dtype, ema_fp32", [("float32", False), ("float32", True), ("bfloat16", False)])
def test_a_shared_table_is_averaged_once_an_update(dtype, ema_fp32):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("first", "second", "third")})
    model["third"].weight = model["second"].weight = model["first"].weight
    torch.nn.init.zeros_(model["first"].weight)
    model.to(getattr(torch, dtype))
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.75, ema_fp32=ema_fp32))
    torch.nn.init.ones_(model["first"].weight)
    for update, expected in ((1, 0.25), (2, 0.4375)):
        ema.step(model, update)
        state = ema.get_model().state_dict() | ema.fp32_params
        assert all(
            torch.equal(state[f"{name}.weight"].float(), torch.full((2, 2), expected)) for name in model
        )


@pytest.mark.parametrize("option", ["--tokens-per-sample 14", "--seed 5"])
def test_other_batches_in_mid_epoch_are_refused(corpus, uninterrupted, tmp_path, option):
    """The position in an epoch would skip some sentences and repeat others."""
    saved = uninterrupted[1] / "checkpoint_1_13.pt"
    options = ["--max-update", 14, *option.split(), "--restore-file", saved]
    name, value = option.split()
    with pytest.raises(UsageError, match=f"in mid-epoch with {name} .*, this run has {value}: sentences"):
        train(*char_lm(corpus, tmp_path, *options))
    log = train(*char_lm(corpus, tmp_path / "reset", *options, "--reset-dataloader"))
    assert len(log.losses) == 1 and float(log.updates[0]["epoch"]) == 1


def test_translation_in_mid_epoch_with_other_batches_is_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    data = tiny_translation.prepare(tmp_path / "corpus")
    train(*tiny_translation.lstm(data, tmp_path / "run", "--max-update", 5, size=8))
    refused = pytest.raises(UsageError, match="in mid-epoch with --max-tokens 100, this run has 200")
    with refused:
        train(*tiny_translation.lstm(data, tmp_path / "run", "--max-update", 9, "--max-tokens", 200, size=8))


def test_batches_are_shuffled_after_the_curriculum_and_a_restart_has_their_order(tmp_path):
    (tmp_path / "corpus").mkdir()
    data = tiny_translation.prepare(tmp_path / "corpus")

    def losses(run, *options):
        line = tiny_translation.lstm(data, tmp_path / run, *LOG, "--num-workers", 0, *options, size=8)
        return train(*line).losses

    end = ["--curriculum", 1, "--max-epoch", 2]
    whole, in_order = (
        losses("whole", *end, "--no-save"),
        losses("order", "--curriculum", 2, *end[2:], "--no-save"),
    )
    updates = len(whole) // 2
    assert whole[:updates] == in_order[:updates] and whole[updates:] != in_order[updates:]
    losses("cut", *end, "--max-update", updates + 5)
    assert losses("cut", *end) == whole[updates + 5 :]


def test_a_composite_optimizer_resumes(uninterrupted, tmp_path):
    """Its state and its schedule's are those of its parts, by name."""
    parts = {"encoder": {"best": 1.0}, "decoder": {}}
    state = torch.load(uninterrupted[1] / "checkpoint_last.pt", weights_only=True)
    state["optimizer_history"] = [{"lr_scheduler_state": parts}, {"lr_scheduler_state": {"lr": 1}}]
    torch.save(state, tmp_path / "saved.pt")
    loaded = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "saved.pt"))["optimizer_history"]
    assert [entry["lr_scheduler_state"] for entry in loaded] == [parts, {"lr": 1, "best": None}]
    resume.flatten_moments(SimpleNamespace(optimizer=SimpleNamespace(optimizer=object())))


def test_a_training_that_also_validates_its_own_split_sees_every_epoch(tmp_path):
    (tmp_path / "corpus").mkdir()
    data, losses = tiny_translation.prepare(tmp_path / "corpus"), []
    for subsets in ("valid", "valid,train"):
        line = [
            *tiny_translation.lstm(data, tmp_path / subsets, "--max-epoch", 3, "--no-save", size=8),
            *("--valid-subset", subsets, "--validate-interval-updates", 10, "--num-workers", 0),
        ]
        log = train(*(option for option in line if option != "--disable-validation"))
        losses.append(log.losses)
        assert [message.startswith("end of epoch 3") for message in log.messages].count(True) == 1
    assert losses[0] == losses[1] and len(losses[0]) > 30


@pytest.mark.parametrize(
    "options", [pytest.param(["--no-epoch-checkpoints"], marks=pytest.mark.slow), ["--save-interval", 3]]
)
def test_an_interval_of_updates_as_long_as_an_epoch_is_saved(corpus, tmp_path, options):
    """An epoch has 22 updates."""
    line = char_lm(corpus, tmp_path / "run", *options, "--save-interval-updates", 11, "--max-update", 34)
    if "--save-interval" in options:
        line.remove("--no-epoch-checkpoints")
    log = train(*line)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint_1_11.pt", "checkpoint_1_22.pt", "checkpoint_2_33.pt"} <= names
    start = ["--restore-file", tmp_path / "run" / "checkpoint_1_22.pt", "--max-update", 34]
    resumed = train(*char_lm(corpus, tmp_path / "resumed", *start))
    assert log.losses[22:] == resumed.losses and float(resumed.updates[0]["epoch"]) == 2


def test_another_batching_in_mid_epoch_is_refused(corpus, tmp_path):
    before, after = "lanes", "windows"
    train(*char_lm(corpus, tmp_path, "--max-update", 5, "--batching", before))
    with pytest.raises(UsageError, match=f"trained with --batching {before}, this run has {after}"):
        train(*char_lm(corpus, tmp_path, "--max-update", 9, "--batching", after))


def test_an_average_of_weights_in_16_bits_is_in_float32(corpus, tmp_path):
    options = ["--bf16", "--store-ema", "--ema-decay", 0.998, "--max-update", 20]
    train(*char_lm(corpus, tmp_path, *options))
    extra = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]
    exact = {name: each for name, each in extra["ema_fp32_params"].items() if each.is_floating_point()}
    assert exact and all(tensor.dtype == torch.float32 for tensor in exact.values())
    averaged = average([tmp_path / "checkpoint_last.pt"], ema=True)["model"]
    assert all(torch.equal(averaged[name], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize(
    "figures, largest", [([2.0, 2.5, 2.2, 2.1], False), ([50.0, 40.0, 45.0, 60.0], True)]
)
@pytest.mark.parametrize("suffix", ["", "-rank-0"])
def test_as_many_best_checkpoints_are_kept_as_were_asked_for(figures, largest, suffix, tmp_path):
    """Whatever the order in which they come."""
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    cfg = CheckpointConfig(
        save_dir=str(tmp_path), keep_best_checkpoints=3, maximize_best_checkpoint_metric=largest
    )
    trainer = SimpleNamespace(
        task=None,
        data_parallel_rank=0,
        checkpoint_suffix=suffix,
        should_save_checkpoint_on_current_rank=True,
        always_call_state_dict_during_save_checkpoint=False,
        consolidate_optimizer=lambda: None,
        get_num_updates=lambda: 1,
        save_checkpoint=lambda path, extra: str(Path(path).write_text("")),
    )
    epochs = SimpleNamespace(epoch=1, end_of_epoch=lambda: True, state_dict=dict)
    for figure in figures:
        checkpoint_utils.save_checkpoint(cfg, trainer, epochs, figure)
    vars(checkpoint_utils.save_checkpoint).pop("best")
    kept = [float(path.stem.split("_")[2].removesuffix(suffix)) for path in tmp_path.glob("*.best_*")]
    expected = sorted(figures, reverse=largest)[:3]
    assert sorted(kept, reverse=largest) == pytest.approx(expected, abs=2e-3)


def test_a_plateau_that_begins_anew_has_the_given_rate(corpus, tmp_path):
    line = char_lm(corpus, tmp_path, "--lr-scheduler", "polynomial_decay", "--total-num-update", 4)
    train(*line, "--max-update", 4)
    options = ["--lr-scheduler", "reduce_lr_on_plateau", "--reset-lr-scheduler", "--lr", 0.02]
    line = [option for option in char_lm(corpus, tmp_path, *options) if option != "--disable-validation"]
    log = train(*line, "--max-update", 6)
    assert [update["lr"] for update in log.updates] == ["0.02", "0.02"]
