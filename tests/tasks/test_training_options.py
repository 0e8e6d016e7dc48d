"""What options of averages, resuming and keeping checkpoints promise, by calculation with small trainings."""

import pytest
import torch
from helpers.in_process import char_lm, train
from helpers.programs import forget_best


def trained(folder, name, *options) -> dict:
    """The last checkpoint of a training of a character model, whose corpus is in the folder."""
    forget_best()
    train(*char_lm(folder, folder / name, *options))
    return torch.load(folder / name / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with a training of five updates, of two batches each."""
    folder = tmp_path_factory.mktemp("trainings")
    trained(folder, "first", "--max-update", 5)
    return folder


AVERAGES = [
    ((), lambda update: 0.5),
    (("--ema-start-update", 3), lambda update: 0.0 if update < 3 else 0.5),
    (("--ema-update-freq", 2), lambda update: 1.0 if update % 2 else 0.5),
]


@pytest.mark.parametrize("options, decay", AVERAGES)
def test_averages_are_computed_from_the_weights_of_every_update(folder, options, decay):
    name = "averages" + "".join(map(str, options))
    keep = ["--store-ema", "--ema-decay", 0.5, "--save-interval-updates", 1, "--max-update", 4]
    average = None
    trained(folder, name, *keep, *options)
    for update in range(1, 5):
        state = torch.load(folder / name / f"checkpoint_1_{update}.pt", weights_only=True)
        weights, results = (
            part["stack.cells.0.weight_h"] for part in (state["model"], state["extra_state"]["ema"])
        )
        if average is not None:
            average = decay(update) * average + (1 - decay(update)) * weights
            torch.testing.assert_close(results, average)
        average = results


@pytest.mark.slow
def test_a_seed_of_the_average(folder):
    """A decay of 1 keeps it."""
    seed = trained(folder, "of_a_seed", "--store-ema", "--max-update", 2)["extra_state"]["ema"]
    path = folder / "of_a_seed" / "checkpoint_last.pt"
    options = ["--store-ema", "--ema-decay", 1, "--ema-seed-model", path, "--max-update", 1, "--seed", 9]
    results = trained(folder, "seeded", *options)["extra_state"]["ema"]
    assert all(torch.equal(results[key], seed[key]) for key in seed)


# Options beside --restore-file and --max-update 7: the batches that were read in the epoch, and weight decay.
RESUMED = [
    ((), 14, 0.0),
    (("--reset-dataloader",), 4, 0.0),
    (("--reset-optimizer",), 24, 0.0),
    (("--optimizer-overrides", "{'weight_decay': 0.25}"), 14, 0.25),
]


@pytest.mark.parametrize("options, batches, decay", RESUMED)
def test_what_is_taken_from_a_checkpoint(folder, options, batches, decay):
    restored = ["--restore-file", folder / "first" / "checkpoint_last.pt", "--max-update", 7]
    state = trained(folder, f"resumed{batches}{decay}", *restored, *options)
    assert state["extra_state"]["train_iterator"]["iterations_in_epoch"] == batches
    [group] = state["last_optimizer_state"]["param_groups"]
    assert group["weight_decay"] == decay
    # Of seven updates in all, those that this optimizer made.
    steps = {values["step"] for values in state["last_optimizer_state"]["state"].values()}
    assert steps == {7} and state["optimizer_history"][-1]["num_updates"] == 7


@pytest.mark.slow
def test_meters_are_reset(folder):
    state = torch.load(folder / "first" / "checkpoint_last.pt", weights_only=True)
    # Far more than these trainings take, however busy the machine is.
    state["extra_state"]["previous_training_time"] = 100_000.0
    torch.save(state, folder / "long.pt")
    restored = ["--restore-file", folder / "long.pt", "--max-update", 6]
    assert trained(folder, "meters", *restored)["extra_state"]["previous_training_time"] > 100_000
    state = trained(folder, "no_meters", *restored, "--reset-meters")
    assert state["extra_state"]["previous_training_time"] < 100_000


def test_fine_tuning_takes_the_weights_alone_and_continuing_goes_on(folder):
    first = folder / "first" / "checkpoint_last.pt"
    weights = torch.load(first, weights_only=True)["model"]
    still = ["--lr", 1e-12, "--max-update", 1]
    state = trained(folder, "tuned", "--finetune-from-model", first, *still)
    assert state["optimizer_history"][-1]["num_updates"] == 1
    for key, value in weights.items():
        torch.testing.assert_close(state["model"][key], value)
    # From the named checkpoint at first, and from its own afterwards.
    for updates in (6, 8):
        state = trained(folder, "continued", "--continue-once", first, "--max-update", updates)
        assert state["extra_state"]["train_iterator"]["iterations_in_epoch"] == 2 * updates


KEPT = [
    (("--keep-interval-updates", 2), "5 6 last"),
    (("--keep-interval-updates", 1, "--keep-interval-updates-pattern", 3), "3 5 6 last"),
    (("--no-last-checkpoints",), "1 2 3 4 5 6"),
]


@pytest.mark.parametrize("options, kept", KEPT)
def test_checkpoints_that_are_kept(folder, options, kept):
    save_dir = folder / kept.replace(" ", "_")
    train(*char_lm(folder, save_dir, "--save-interval-updates", 1, "--max-update", 6, *options))
    names = sorted(path.stem.removeprefix("checkpoint_").removeprefix("1_") for path in save_dir.iterdir())
    assert " ".join(names) == kept


def test_the_last_epoch_is_saved_whatever_the_interval(folder):
    """fairseq would end with the checkpoint of the second of three epochs."""
    save_dir = folder / "odd"
    options = [option for option in char_lm(folder, save_dir) if option != "--no-epoch-checkpoints"]
    log = train(*options, "--save-interval", 2, "--max-epoch", 3)
    assert sorted(path.stem for path in save_dir.iterdir()) == ["checkpoint2", "checkpoint_last"]
    last = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    assert last["optimizer_history"][-1]["num_updates"] == len(log.updates)
