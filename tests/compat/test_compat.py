"""The adaptations of fairseq. Each test names the one that it fails without."""

import argparse
import logging
import os
import re
import sys

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import TokenBlockDataset, data_utils, iterators
from fairseq.distributed import utils as distributed_utils
from helpers.cli import fairseq_train, lstm

import rhhn_fairseq
from rhhn_fairseq import plugin as compat
from rhhn_fairseq.compat import PATCHES, errors, in_place_of
from rhhn_fairseq.errors import UsageError

PACKAGE = os.path.dirname(rhhn_fairseq.__file__)
compat.apply()


def test_every_function_is_replaced_once():
    before = (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)
    compat.apply()
    assert before == (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)
    with pytest.raises(ValueError, match="is replaced already"):
        in_place_of("fairseq.utils:load_align_dict")(len)
    # The reason stands in the first line. What a colleague must know of is few functions in few files.
    assert all(function.__doc__ for function in PATCHES.values())
    assert len(PATCHES) <= 39 and len({function.__module__ for function in PATCHES.values()}) <= 5


# One line


def chained(cause, context):
    """`context`, raised while an exception that was raised from `cause` is handled."""
    try:
        try:
            try:
                raise cause
            except Exception as error:
                raise Exception("wrapped by fairseq") from error
        except Exception:
            raise context  # noqa: B904
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("--hidden 0\n must be 1 or more"), "--hidden 0 must be 1 or more"),
        (chained(UsageError("the cause"), KeyError("last")), "the cause"),
        # How a data loader's worker and a spawned process hand an error over.
        (UsageError("Caught UsageError\n  File\nrhhn_fairseq.errors.UsageError: a\n"), "a"),
        (RuntimeError("-- Process 0 --\nrhhn_fairseq.errors.UsageError: b\n\nDuring ..."), "b"),
    ],
)
def test_usage_message(error, message):
    assert errors.message_of(error) == message


def test_excepthook(capsys, monkeypatch):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: others.append(args[0]))
    errors.install_excepthook()
    errors.install_excepthook()
    error = chained(UsageError("no such file"), KeyError())
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "error: no such file\n"
    # In a notebook, which has imported the plugin, other exceptions keep their traceback.
    monkeypatch.delitem(sys.modules, "fairseq_cli", raising=False)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert others == [ValueError]
    monkeypatch.setenv("RHHN_TRACEBACK", "1")
    sys.excepthook(type(error), error, error.__traceback__)
    assert others == [ValueError, KeyError]


def test_a_run_that_diverges_ends_in_one_line(tiny_corpus, tmp_path):
    """KNOWN_WARNINGS: nothing else is on stderr."""
    arguments = lstm(tiny_corpus, tmp_path, "--max-update", 50, "--clip-norm", 0)
    arguments[arguments.index(0.01)] = 1e38
    result = fairseq_train(arguments, check=False)
    assert result.returncode == 1
    assert re.fullmatch(r"error: gradients are Nan/Inf \(.*; the traceback is in \S+\n", result.stderr)


# The user directory


def import_user_module(path):
    utils.import_user_module(argparse.Namespace(user_dir=str(path)))


def test_same_directory_by_other_paths(tmp_path, monkeypatch):
    """fairseq finds a link, or a path with .. in it, "not globally unique"."""
    (tmp_path / "rhhn_fairseq").symlink_to(PACKAGE)
    import_user_module(tmp_path / "rhhn_fairseq")
    import_user_module(os.path.join(PACKAGE, "..", "rhhn_fairseq"))
    monkeypatch.chdir(os.path.dirname(PACKAGE))
    import_user_module("rhhn_fairseq")
    utils.import_user_module(argparse.Namespace())


def test_another_copy_is_one_line_with_both_paths(tmp_path):
    (tmp_path / "rhhn_fairseq").mkdir()
    both = f"{re.escape(str(tmp_path))}.*{re.escape(os.path.realpath(PACKAGE))}"
    with pytest.raises(UsageError, match=both):
        import_user_module(tmp_path / "rhhn_fairseq")


# Reading data


def test_removed_numpy_names():
    """--sample-break-mode eos uses np.compat.long."""
    sizes = [2, 3, 4]
    dataset = TokenBlockDataset(
        [torch.arange(size) for size in sizes], sizes, None, pad=1, eos=2, break_mode="eos"
    )
    assert [len(item) for item in dataset] == sizes
    assert data_utils.np.fromiter([1, 2], data_utils.np.int).tolist() == [1, 2]
    assert not hasattr(numpy, "compat") or not hasattr(numpy, "int")


@pytest.mark.parametrize("sentences, tokens, multiple", [(5, None, 8), (None, 40, 3), (4, 40, 1)])
def test_no_sentence_is_left_out_of_the_batches(sentences, tokens, multiple):
    lengths = numpy.array([3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 20, 30], dtype=numpy.int64)
    batches = data_utils.batch_by_size(
        numpy.arange(12), None, lengths, tokens, sentences, required_batch_size_multiple=multiple
    )
    assert numpy.concatenate(batches).tolist() == list(range(12))
    assert all(len(batch) <= (sentences or 12) for batch in batches)
    assert all(len(batch) * lengths[batch].max() <= (tokens or 1000) for batch in batches)


def test_reading_stops_with_the_program(worker, monkeypatch):
    """fairseq leaves this thread running, full queue or not."""
    monkeypatch.delenv("RANK")
    iterator = iterators.BufferedIterator(2, range(10**9))

    def main(cfg):
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        assert iterator._consumer.is_alive()

    distributed_utils.call_main(worker, main)
    assert not iterator._consumer.is_alive()


# What is printed


def test_inf_score_record_is_repaired():
    """The call is the one in fairseq_cli/eval_lm.py, which has no placeholder for the value."""
    logger = logging.getLogger("fairseq_cli.eval_lm")
    said = []
    for arguments in (("skipping tokens with inf scores:", "the\nlong"), ("%d tokens", 3), ("100 % of it",)):
        record = logger.makeRecord(logger.name, logging.INFO, "", 1, arguments[0], arguments[1:], None)
        logger.filter(record)
        said.append(record.getMessage())
    assert said == ["skipping tokens with inf scores: the long", "3 tokens", "100 % of it"]
