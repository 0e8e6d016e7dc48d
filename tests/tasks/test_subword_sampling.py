"""--subword-sampling of the task ``gnmt_translation``."""

import shutil

import pytest
import torch
from fairseq.logging import metrics
from helpers import tiny_translation
from helpers.cli import fairseq_train, model_of

from rhhn_fairseq.errors import UsageError

# Hydra deprecates what fairseq's own configuration rests on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_translation.prepare(tmp_path_factory.mktemp("corpus"))


def _arguments(corpus, save_dir, *options):
    sizes = ["--hidden-size", 8, "--embed-dim", 8]
    sampling = ["--subword-sampling", 0.2, "--no-epoch-checkpoints", "--log-format", "json"]
    own = ["--task", "gnmt_translation", "--arch", "lstm_gnmt_small", *sizes, *sampling]
    return tiny_translation.arguments(corpus, save_dir, *own, *options)


def _trained_task(corpus, save_dir, *options):
    from fairseq import options as fairseq_options
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = fairseq_options.get_training_parser()
    arguments = list(map(str, _arguments(corpus, save_dir, *options)))
    task = tasks.setup_task(
        convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments)).task
    )
    task.load_dataset("train")
    return task


def _pairs(task, epoch):
    dataset = task.dataset("train")
    dataset.set_epoch(epoch)
    return [
        (pair["source"].tolist(), pair["target"].tolist()) for pair in map(dataset.__getitem__, range(30))
    ]


def test_epochs_and_seeds_differ_and_nothing_else_does(corpus, tmp_path):
    task = _trained_task(corpus, tmp_path)
    first, second = _pairs(task, 1), _pairs(task, 2)
    assert first != second and _pairs(task, 1) == first
    assert _pairs(_trained_task(corpus, tmp_path, "--seed", 7), 1) != first
    plain = _pairs(_trained_task(corpus, tmp_path, "--subword-sampling", 0), 1)
    texts = [
        [[task.src_dict.string(torch.tensor(side), "sentencepiece") for side in pair] for pair in pairs]
        for pairs in (first, second, plain)
    ]
    assert texts[0] == texts[1] == texts[2] and first != plain
    # Batches are those of the lengths that the data was prepared with.
    assert (
        task.dataset("train").sizes
        == _trained_task(corpus, tmp_path, "--subword-sampling", 0).dataset("train").sizes
    ).all()


def test_a_restart_draws_what_the_whole_training_drew(corpus, tmp_path):
    fairseq_train(_arguments(corpus, tmp_path / "whole", "--max-epoch", 3, "--num-workers", 0))
    fairseq_train(_arguments(corpus, tmp_path / "parts", "--max-update", 25))
    fairseq_train(_arguments(corpus, tmp_path / "parts", "--max-epoch", 3, "--num-workers", 2))
    one, other = (model_of(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "option", [("--subword-sampling", -1), ("--subword-nbest", 1), ("--subword-nbest", 513)]
)
def test_a_value_that_cannot_be_is_refused(corpus, tmp_path, option):
    with pytest.raises(UsageError, match=f"{option[0]} {option[1]}.* is too (small|large)"):
        _trained_task(corpus, tmp_path, *option)


def test_batches_have_a_key_of_their_own(corpus, tmp_path):
    """By which the random numbers of dropout differ between batches of equal size."""
    dataset = _trained_task(corpus, tmp_path).dataset("train")
    keys = [dataset.collater([dataset[i] for i in rows])["key"] for rows in ((3, 1), (4, 2))]
    assert keys == [1, 2]
    assert not dataset.collater([])


def test_empty_translations_have_a_bleu_of_zero(corpus, tmp_path):
    """Alone and before others; fairseq logs none, and --best-checkpoint-metric bleu needs one."""
    task = _trained_task(corpus, tmp_path, "--eval-bleu", "--eval-bleu-args", "{}")
    criterion = type("criterion", (), {"reduce_metrics": staticmethod(lambda logging_outputs: None)})()

    def log(count):
        sums = {f"_bleu_{name}_{i}": count for name in ("counts", "totals") for i in range(4)}
        return sums | {"_bleu_sys_len": count, "_bleu_ref_len": 4, "ntokens": 4, "nsentences": 1}

    with metrics.aggregate(new_root=True) as values:
        task.reduce_metrics([log(0)], criterion)
        assert values["bleu"].fn(values) == 0
        task.reduce_metrics([log(4)], criterion)
        # The length of 4 is that of the reference of this batch, which alone has counts.
        assert values["bleu"].fn(values) == 100
    with metrics.aggregate(new_root=True) as values:
        task.reduce_metrics([{"ntokens": 4, "nsentences": 1}], criterion)
        assert "bleu" not in values


def test_a_second_training_split_is_read(corpus, tmp_path):
    """fairseq's default of --upsample-primary is no number of copies."""
    data = shutil.copytree(corpus, tmp_path / "data")
    for path in list(data.glob("valid.*")):
        shutil.copy(path, data / path.name.replace("valid", "train1"))
    task = _trained_task(data, tmp_path)
    task.load_dataset("train", combine=True)
    assert len(task.dataset("train")) == tiny_translation.SPLITS["train"] + tiny_translation.SPLITS["valid"]
