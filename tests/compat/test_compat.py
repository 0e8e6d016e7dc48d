"""The adaptations of fairseq. Each test names the one that it fails without."""

import argparse
import logging
import os
import re
import sys
import warnings

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import TokenBlockDataset, data_utils, iterators
from fairseq.distributed import utils as distributed_utils
from helpers.cli import fairseq_train, hydra_arguments, lstm, python, run_module
from hydra.core.utils import JobReturn, JobStatus

import rhhn_fairseq
from rhhn_fairseq.compat import applying as compat
from rhhn_fairseq.compat import logs, mentions, one_line
from rhhn_fairseq.compat.divergence import is_divergence
from rhhn_fairseq.errors import UsageError

PACKAGE = os.path.dirname(rhhn_fairseq.__file__)
compat.apply()


def test_apply_again_changes_nothing(caplog):
    before = (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)
    with caplog.at_level(logging.DEBUG, "rhhn_fairseq.compat"):
        compat.apply()
    assert not caplog.records
    assert before == (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)


def test_each_adaptation_is_logged_once():
    code = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "import rhhn_fairseq.plugin; rhhn_fairseq.plugin.applying.apply()"
    )
    result = python(code)
    (line,) = re.findall(r"DEBUG:rhhn_fairseq.compat:(.*)", result.stderr)
    names = re.findall(r"(\w+) \((?:done|not needed)\)", line)
    assert names == [adapt.__name__ for adapt in compat.ADAPTATIONS]


def test_mentions_finds_names_keywords_and_strings():
    def function():
        return [os.environ.get("A STRING", default=1) for _ in ()]

    assert all(mentions(function, word) for word in ("environ", "A STRING", "default"))
    assert not mentions(function, "realpath")


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
    assert one_line.message_of(error) == message


def test_excepthook(capsys, monkeypatch):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: others.append(args[0]))
    one_line.install_excepthook()
    one_line.install_excepthook()
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


def test_hydra_ends_in_one_line(tiny_corpus, tmp_path):
    """end_hydra_in_one_line."""
    arguments = hydra_arguments(tiny_corpus, tmp_path, "optimization.max_update=-1")
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    errors = result.stderr.splitlines()
    assert errors[-1] == "error: optimization.max_update -1 is not possible: at least 0"
    assert "Traceback" not in result.stderr and "overrides" not in result.stderr


def test_hydra_job(monkeypatch, capsys):
    """end_hydra_in_one_line, and what it leaves as it was."""
    failed = JobReturn(status=JobStatus.FAILED, overrides=[])
    failed.return_value = chained(UsageError("no such file"), KeyError())
    with pytest.raises(SystemExit, match="^error: no such file$"):
        _ = failed.return_value
    monkeypatch.setenv("RHHN_TRACEBACK", "1")
    with pytest.raises(KeyError):
        _ = failed.return_value
    completed = JobReturn(status=JobStatus.COMPLETED)
    completed.return_value = 1.5
    assert completed.return_value == 1.5


def test_divergence_ends_in_one_line(tiny_corpus, tmp_path):
    """end_divergence_in_one_line, and silence_known_warnings: nothing else is on stderr."""
    arguments = lstm(tiny_corpus, tmp_path, "--max-update", 50, "--clip-norm", 0)
    arguments[arguments.index(0.01)] = 1e38
    result = fairseq_train(arguments, check=False)
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: training diverged in update \d+: the loss or a gradient became NaN or infinite "
        r"\(in decoder\.\S+\); try "
        r"a lower --lr \(now 1e\+38\) or a stronger --clip-norm \(now off\); fairseq left the weights before "
        r"it in \S+/crash.pt\n",
        result.stderr,
    )
    assert "NaN detected in output of" in result.stdout
    assert "NaN or infinite gradients: decoder." in result.stdout
    assert "gradients: {" not in result.stdout and "norms: {" not in result.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gradients are Nan/Inf", True),
        ("Minimum loss scale reached (0.0001). Your loss is probably exploding.", True),
        ("AMP: Minimum loss scale reached (0.0001).", True),
        ("gradients are inconsistent\nrank   0 = nan\nrank   1 = nan", True),
        ("gradients are inconsistent\nrank   0 = 1.25\nrank   1 = inf", True),
        ("gradients are inconsistent\nrank   0 = 1.25\nrank   1 = 1.26", False),
    ],
)
def test_is_divergence(text, expected):
    assert is_divergence(FloatingPointError(text)) is expected


# The user directory


def import_user_module(path):
    utils.import_user_module(argparse.Namespace(user_dir=str(path)))


def test_same_directory_by_other_paths(tmp_path, monkeypatch):
    """accept_same_directory: fairseq finds a link, or a path with .. in it, "not globally unique"."""
    (tmp_path / "rhhn_fairseq").symlink_to(PACKAGE)
    import_user_module(tmp_path / "rhhn_fairseq")
    import_user_module(os.path.join(PACKAGE, "..", "rhhn_fairseq"))
    monkeypatch.chdir(os.path.dirname(PACKAGE))
    import_user_module("rhhn_fairseq")
    utils.import_user_module(argparse.Namespace())


def test_installed_package_by_its_name_alone(tmp_path, monkeypatch):
    """fairseq then looks beside itself and makes site-packages/fairseq/../rhhn_fairseq of it."""
    site = tmp_path / "site-packages"
    (site / "fairseq").mkdir(parents=True)
    (site / "rhhn_fairseq").symlink_to(PACKAGE)
    monkeypatch.setattr(utils, "__file__", str(site / "fairseq" / "utils.py"))
    monkeypatch.chdir(tmp_path)
    import_user_module("rhhn_fairseq")


def test_another_copy_is_one_line_with_both_paths(tmp_path):
    (tmp_path / "rhhn_fairseq").mkdir()
    both = f"{re.escape(str(tmp_path))}.*{re.escape(os.path.realpath(PACKAGE))}"
    with pytest.raises(UsageError, match=both):
        import_user_module(tmp_path / "rhhn_fairseq")


def test_missing_user_dir_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="there is no directory /"):
        import_user_module(tmp_path / "nowhere")


def test_a_file_is_no_user_directory(tmp_path):
    (tmp_path / "plugin.py").touch()
    with pytest.raises(UsageError, match=f"there is no directory {tmp_path}/plugin.py"):
        import_user_module(tmp_path / "plugin.py")


def test_other_user_directories_still_work(tmp_path):
    (tmp_path / "someones_plugin").mkdir()
    (tmp_path / "someones_plugin" / "__init__.py").touch()
    import_user_module(tmp_path / "someones_plugin")
    assert "someones_plugin" in sys.modules


# Reading data


def test_removed_numpy_names():
    """restore_numpy_names; --sample-break-mode eos uses np.compat.long."""
    sizes = [2, 3, 4]
    dataset = TokenBlockDataset(
        [torch.arange(size) for size in sizes], sizes, None, pad=1, eos=2, break_mode="eos"
    )
    assert [len(item) for item in dataset] == sizes
    assert data_utils.np.fromiter([1, 2], data_utils.np.int).tolist() == [1, 2]
    assert not hasattr(numpy, "compat") or not hasattr(numpy, "int")


@pytest.mark.parametrize("sentences, tokens", [(4, None), (5, None), (None, 40), (12, 1000), (4, 40)])
@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_no_sentence_is_left_out_of_the_batches(sentences, tokens, multiple):
    lengths = numpy.array([3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 20, 30], dtype=numpy.int64)
    batches = data_utils.batch_by_size(
        numpy.arange(12), None, lengths, tokens, sentences, required_batch_size_multiple=multiple
    )
    assert numpy.concatenate(batches).tolist() == list(range(12))
    assert all(len(batch) <= (sentences or 12) for batch in batches)
    assert all(len(batch) * lengths[batch].max() <= (tokens or 1000) for batch in batches)


def test_reading_stops_with_the_program(worker, monkeypatch):
    """stop_reading_at_the_end: fairseq leaves this thread running, full queue or not."""
    monkeypatch.delenv("RANK")
    iterator = iterators.BufferedIterator(2, range(10**9))

    def main(cfg):
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        assert iterator._consumer.is_alive()

    distributed_utils.call_main(worker, main)
    assert not iterator._consumer.is_alive()


# What is printed


def test_inf_score_record_is_repaired(capsys):
    """repair_inf_score_record; the call is the one in fairseq_cli/eval_lm.py."""
    logger = logging.getLogger("fairseq_cli.eval_lm")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("skipping tokens with inf scores:", "the\nlong")
        logger.info("%d tokens", 3)
        logger.info("100 % of it")
    finally:
        logger.removeHandler(handler)
    assert lines == ["skipping tokens with inf scores: the long", "3 tokens", "100 % of it"]
    assert "Logging error" not in capsys.readouterr().err


def test_a_root_logger_in_fairseq_s_debug_state_is_repaired(monkeypatch):
    """restore_root_logger; any other state is the user's own."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    monkeypatch.setitem(sys.modules, "fairseq_cli", sys)
    root, handler = logging.RootLogger(logging.DEBUG), logging.StreamHandler()
    monkeypatch.setattr(logging, "getLogger", lambda name=None: root)
    root.handlers = [handler]
    assert not logs.restore_root_logger()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    for level, handlers in ((logging.INFO, [handler]), (logging.DEBUG, [handler, handler])):
        root.level, root.handlers = level, handlers
        assert not logs.restore_root_logger()
    root.level, root.handlers = logging.DEBUG, [handler]
    assert logs.restore_root_logger()
    assert root.level == logging.INFO and handler.formatter._fmt.startswith("%(asctime)s | ")


def test_only_known_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        logs.silence_known_warnings()
        text = "`torch.cuda.amp.autocast(args...)` is deprecated."
        warnings.warn_explicit(text, FutureWarning, "f.py", 1, module="fairseq.tasks.fairseq_task")
        warnings.warn_explicit(text, FutureWarning, "f.py", 1, module="rhhn_fairseq.tasks.char_lm")
        warnings.warn_explicit("other", FutureWarning, "f.py", 1, module="fairseq.tasks.fairseq_task")
        weights = "RNN module weights are not part of single contiguous chunk of memory. This means they need"
        warnings.warn_explicit(weights, UserWarning, "f.py", 1, module="rhhn_fairseq.ops.backends.torch_nn")
        warnings.warn_explicit(weights, UserWarning, "f.py", 1, module="torch.nn.modules.rnn")
    assert [str(warning.message) for warning in caught] == [text, "other", weights]
