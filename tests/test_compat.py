"""The adaptations of fairseq. Each test names the one that it fails without."""

import argparse
import logging
import os
import pickle
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy
import pytest
import torch
from cli import fairseq_train, json_log, run_module
from fairseq import checkpoint_utils, utils
from fairseq.data import TokenBlockDataset, data_utils, iterators
from fairseq.distributed import utils as distributed_utils
from fairseq.models.lstm_lm import LSTMLanguageModel
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from rhhn_fairseq import compat
from rhhn_fairseq.adaptations import logs, mentions, one_line, torchrun
from rhhn_fairseq.adaptations.expressions import evaluate
from rhhn_fairseq.errors import UsageError

PACKAGE = os.path.dirname(compat.__file__)
compat.apply()


def lstm(corpus, save_dir, *options):
    """Arguments of a small fairseq model without dropout."""
    sizes = ["--decoder-embed-dim", 8, "--decoder-hidden-size", 8, "--decoder-out-embed-dim", 8]
    data = [corpus, "--task", "language_modeling", "--tokens-per-sample", 12, "--max-tokens", 48]
    model = ["--arch", "lstm_lm", "--decoder-layers", 1, *sizes, "--dropout", 0]
    logs = ["--log-format", "json", "--log-interval", 1, "--save-dir", save_dir]
    return [*data, *model, "--optimizer", "adam", "--lr", 0.01, *logs, *options]


def model_of(save_dir, name="checkpoint_last.pt"):
    return torch.load(save_dir / name, weights_only=True)["model"]


def test_apply_again_changes_nothing(caplog):
    before = (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)
    with caplog.at_level(logging.DEBUG, "rhhn_fairseq.compat"):
        compat.apply()
    assert not caplog.records
    assert before == (distributed_utils.call_main, checkpoint_utils.torch, utils.import_user_module)


def test_each_adaptation_is_logged_once():
    code = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "import rhhn_fairseq.plugin; rhhn_fairseq.plugin.compat.apply()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = re.findall(r"DEBUG:rhhn_fairseq.compat:(.*)", result.stderr)
    names = re.findall(r"(\w+) \((?:done|not needed)\)", line)
    assert names == [adapt.__name__ for adapt in compat.ADAPTATIONS]


def test_mentions_finds_names_keywords_and_strings():
    def function():
        return [os.environ.get("A STRING", default=1) for _ in ()]

    assert all(mentions(function, word) for word in ("environ", "A STRING", "default"))
    assert not mentions(function, "realpath")


# Checkpoints


class Smuggler:
    """Unpickling it runs a program."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def save_pickle(obj, path):
    path.write_bytes(pickle.dumps(obj))


def save_old_format(obj, path):
    torch.save(obj, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, save_old_format, save_pickle])
@pytest.mark.parametrize("force_unsafe", ["0", "1"])
def test_smuggled_code_is_refused(tmp_path, monkeypatch, save, force_unsafe):
    """load_weights_only; with the variable set, PyTorch's default would be to run the code."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force_unsafe)
    path = tmp_path / "evil.pt"
    save({"model": {}, "extra_state": Smuggler(f"touch {tmp_path}/ran")}, path)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert not (tmp_path / "ran").exists()


def test_weights_only_cannot_be_switched_off_by_the_caller(tmp_path):
    path = tmp_path / "evil.pt"
    torch.save({"model": Smuggler(f"touch {tmp_path}/ran")}, path)
    with path.open("rb") as file, pytest.raises(UsageError, match="posix.system"):
        checkpoint_utils.torch.load(file, weights_only=False)
    assert not (tmp_path / "ran").exists()
    assert checkpoint_utils.torch.Tensor is torch.Tensor


def test_other_classes_are_refused_and_namespace_is_not(tmp_path):
    """allow_namespace."""
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "args": argparse.Namespace(task="language_modeling")}, path)
    with path.open("rb") as file:
        assert checkpoint_utils.torch.load(file)["args"].task == "language_modeling"
    torch.save({"model": {}, "args": SimpleNamespace(task="language_modeling")}, path)
    with pytest.raises(UsageError, match="types.SimpleNamespace"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize("kind", ["cut", "empty", "text", "list", "missing", "directory"])
def test_unreadable_checkpoint_is_one_line(tmp_path, kind):
    """load_weights_only and name_missing_file."""
    path = tmp_path / "checkpoint.pt"
    if kind == "directory":
        path.mkdir()
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind != "missing":
        torch.save({"model": {"weight": torch.zeros(1000)}}, path)
        content = {"cut": path.read_bytes()[:2000], "empty": b"", "text": b"not a checkpoint"}
        path.write_bytes(content[kind])
    with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert "\n" not in str(caught.value)


def test_nothing_but_namespace_is_allowed():
    """PyTorch's own modules allow some classes of theirs; the plugin adds one to them."""
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fairseq, fairseq.trainer, argparse, torch.distributed.run\n"
            "from torch.serialization import get_safe_globals\n"
            "before = set(get_safe_globals())\n"
            "import rhhn_fairseq.plugin\n"
            "assert set(get_safe_globals()) - before == {argparse.Namespace}, get_safe_globals()",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_missing_model_of_an_evaluation_is_one_line():
    with pytest.raises(UsageError, match="Model file not found: nowhere.pt"):
        checkpoint_utils.load_model_ensemble_and_task(["nowhere.pt"])


@pytest.mark.parametrize("option", ["restore_file", "finetune_from_model", "continue_once"])
def test_named_checkpoint_must_exist(tmp_path, option):
    """require_named_checkpoint: without it fairseq trains from scratch, or shows a traceback."""
    given = {"restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    given |= {"continue_once": None, option: "nowhere.pt"}
    reset = dict.fromkeys(["optimizer", "lr_scheduler", "meters", "dataloader"], False)
    config = SimpleNamespace(
        save_dir=str(tmp_path),
        optimizer_overrides="{}",
        **given,
        **{f"reset_{name}": value for name, value in reset.items()},
    )
    trainer = SimpleNamespace(checkpoint_suffix="")
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} nowhere.pt"):
        checkpoint_utils.load_checkpoint(config, trainer)


def test_configuration_strings_run_no_code(tmp_path):
    """configuration_is_data: the configuration inside a checkpoint reaches these calls of eval."""
    assert utils.eval_str_list("[1, 2] * 2", type=int) == [1, 2, 1, 2]
    assert utils.eval_bool("True") is True and utils.eval_bool(None, default=True) is True
    args = argparse.Namespace(decoder_layers=f"[__import__('os').mkdir({str(tmp_path / 'ran')!r})]")
    with pytest.raises(UsageError, match="is not made of numbers"):
        utils.eval_str_list(args.decoder_layers)
    from fairseq.models import fconv_lm

    assert fconv_lm.eval is evaluate
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[(512, 10, 5)] + [(512, 3, 2)] * 2", [(512, 10, 5), (512, 3, 2), (512, 3, 2)]),
        ("{'a': -1.5, 'b': None}", {"a": -1.5, "b": None}),
        (" 1e-30 ", 1e-30),
        ("{1, 6 / 3}", {1, 2.0}),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["f()", "a", "(1).real", "[x for x in (1,)]", "1 +", "2 ** 9", "1/0"])
def test_evaluate_refuses(text):
    with pytest.raises(UsageError, match="is not made of numbers"):
        evaluate(text)


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
        (ValueError("something else"), None),
        (None, None),
    ],
)
def test_usage_message(error, message):
    assert one_line.usage_message(error) == message


def test_excepthook(capsys, monkeypatch):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: others.append(args[0]))
    one_line.install_excepthook()
    one_line.install_excepthook()
    error = chained(UsageError("no such file"), KeyError())
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "error: no such file\n"
    sys.excepthook(ValueError, ValueError("x"), None)
    assert others == [ValueError]
    monkeypatch.setenv("RHHN_TRACEBACK", "1")
    sys.excepthook(type(error), error, error.__traceback__)
    assert others == [ValueError, KeyError]


def hydra_arguments(corpus, save_dir, *overrides):
    model = ["model=transformer_lm", "model.decoder_layers=1", "model.decoder_embed_dim=16"]
    model += ["model.decoder_ffn_embed_dim=16", "model.decoder_attention_heads=2", "model.dropout=0"]
    task = ["task=language_modeling", f"task.data={corpus}", "task.tokens_per_sample=12"]
    rest = ["criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed"]
    rest += ["optimization.lr=[0.01]", "dataset.max_tokens=48", f"common.user_dir={PACKAGE}"]
    rest += [f"checkpoint.save_dir={save_dir}", "common.log_format=json", "common.log_interval=1"]
    hydra = ["hydra.run.dir=.", "hydra.job.chdir=false", "hydra.output_subdir=null"]
    return [*model, *task, *rest, *hydra, *overrides]


def test_hydra_ends_in_one_line(tiny_corpus, tmp_path):
    """end_hydra_in_one_line."""
    arguments = hydra_arguments(tiny_corpus, tmp_path, "checkpoint.restore_file=nowhere.pt")
    result = run_module("fairseq_cli.hydra_train", arguments, check=False, cwd=tmp_path)
    assert result.returncode == 1
    errors = result.stderr.splitlines()
    assert errors[-1] == "error: --restore-file nowhere.pt: there is no such checkpoint file"
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
        r"error: training diverged in update \d+: the loss or a gradient became NaN or infinite; try "
        r"a lower --lr \(now 1e\+38\) or a stronger --clip-norm \(now off\)\n",
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
    assert one_line.is_divergence(FloatingPointError(text)) is expected


@pytest.mark.slow
def test_other_architecture_is_one_line(tiny_corpus, tmp_path):
    """name_mismatch, and require_named_checkpoint lets an existing file pass."""
    fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 1))
    restore = ["--restore-file", tmp_path / "checkpoint_last.pt", "--max-update", 2]
    arguments = lstm(tiny_corpus, tmp_path / "other", *restore, "--decoder-out-embed-dim", 6)
    result = fairseq_train(arguments, check=False)
    assert result.returncode == 1
    assert re.fullmatch(r"error: checkpoint \S+ does not fit the model: .*decoder.*\n", result.stderr)


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


def test_only_known_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        logs.silence_known_warnings()
        text = "`torch.cuda.amp.autocast(args...)` is deprecated."
        warnings.warn_explicit(text, FutureWarning, "f.py", 1, module="fairseq.tasks.fairseq_task")
        warnings.warn_explicit(text, FutureWarning, "f.py", 1, module="rhhn_fairseq.tasks.char_lm")
        warnings.warn_explicit("other", FutureWarning, "f.py", 1, module="fairseq.tasks.fairseq_task")
    assert [str(warning.message) for warning in caught] == [text, "other"]


# Several workers


@pytest.fixture
def worker(monkeypatch):
    """The environment of worker 3 of 4, the second on its node, and a configuration."""
    values = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3"}
    for name, value in {**values, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return OmegaConf.create(
        {
            "common": {"cpu": False, "bf16": False, "tpu": False},
            "distributed_training": {
                "distributed_world_size": 1,
                "distributed_rank": 0,
                "distributed_backend": "nccl",
                "distributed_init_method": None,
                "distributed_no_spawn": False,
                "device_id": 0,
                "pipeline_model_parallel": False,
                "tpu": "${common.tpu}",
            },
        }
    )


def joined(cfg):
    torchrun.join(cfg)
    training = cfg.distributed_training
    assert training.distributed_no_spawn
    return (
        training.distributed_world_size,
        training.distributed_rank,
        training.device_id,
        training.distributed_backend,
        training.distributed_init_method,
    )


def test_join_on_the_cpu(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torchrun.launched_by_torchrun(worker.distributed_training)
    assert joined(worker) == (4, 3, 0, "gloo", "env://")


def test_join_on_gpus(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert joined(worker) == (4, 3, 1, "nccl", "env://")


def test_join_with_more_workers_than_gpus(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"worker 1 .* 1 GPU\(s\): lower --nproc-per-node"):
        torchrun.join(worker)
    worker.common.cpu = True
    assert joined(worker) == (4, 3, 0, "gloo", "env://")


def test_join_keeps_a_backend_given_by_hand(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker.distributed_training.distributed_backend = "mpi"
    assert joined(worker)[3] == "mpi"


def test_join_a_single_worker(worker, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    worker.distributed_training.distributed_world_size = 8
    assert joined(worker)[:3] == (1, 0, 0)
    assert worker.distributed_training.distributed_init_method is None


@pytest.mark.parametrize("name", torchrun.ENVIRONMENT)
def test_part_of_the_environment_is_not_torchrun(worker, monkeypatch, name):
    monkeypatch.delenv(name)
    assert not torchrun.launched_by_torchrun(worker.distributed_training)


def test_an_init_method_given_by_hand_is_kept(worker):
    worker.distributed_training.distributed_init_method = "tcp://localhost:1"
    assert not torchrun.launched_by_torchrun(worker.distributed_training)


def test_reports_on_a_share_are_refused(worker, monkeypatch):
    from fairseq_cli import eval_lm

    with pytest.raises(UsageError, match="run it without torchrun"):
        distributed_utils.call_main(worker, eval_lm.main)
    torchrun.refuse_partial_report(eval_lm.main, workers=1)


def test_cpu_option_keeps_off_the_gpu(worker, monkeypatch):
    """keep_off_gpu."""
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    for cpu in (True, False):
        worker.common.cpu = cpu
        distributed_utils.call_main(worker, lambda cfg: seen.append(torch.cuda.is_available()))
    assert seen == [False, True]
    assert torch.cuda.is_available()


def test_bf16_needs_no_tpu(worker, monkeypatch):
    """train_bf16_without_tpu; fairseq's command line sets the flag for every --bf16."""
    monkeypatch.delenv("RANK")
    worker.common.bf16 = worker.common.tpu = True
    distributed_utils.call_main(worker, lambda cfg: None)
    assert worker.common.tpu is False and worker.distributed_training.tpu is False


@pytest.mark.slow
def test_old_style_checkpoint_of_a_dataclass_less_model(tiny_corpus, tmp_path):
    """allow_namespace: lstm_lm is configured by a Namespace; it is resumed, evaluated, validated."""
    fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 2))
    path = tmp_path / "checkpoint_last.pt"
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert unsafe == []  # Namespace is allowed in this process; nothing else is in the file.
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert isinstance(state["cfg"]["model"], argparse.Namespace)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert isinstance(model, LSTMLanguageModel)
    resumed = fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 3))
    steps = [r for r in json_log(resumed.stdout) if r["tag"] == "train_inner"]
    assert [step["num_updates"] for step in steps] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
def test_two_workers_equal_update_freq_two(tiny_corpus, tmp_path, backend):
    """honour_environment and wrap_cpu_modules; 13 batches, so one worker ends on a dummy batch.

    Differences of 1e-7 come from the order of sums; Adam's division can magnify them.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    options = ["--max-epoch", 2, "--ddp-backend", backend, "--clip-norm", 1]
    single = fairseq_train(lstm(tiny_corpus, one, *options, "--update-freq", 2))
    double = fairseq_train(lstm(tiny_corpus, two, *options), workers=2)
    compared = ("epoch", "update", "loss", "num_updates", "gnorm", "wpb", "valid_loss", "train_loss")
    records = [
        [{key: record[key] for key in compared if key in record} for record in json_log(run.stdout)]
        for run in (single, double)
    ]
    assert len(records[0]) == 2 * (7 + 2)
    assert records[0] == records[1]
    ours, theirs = model_of(one), model_of(two)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_workers_resume_in_mid_epoch(tiny_corpus, tmp_path):
    """broadcast_objects: rank 0 reads the checkpoint and sends it to rank 1."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    options = ["--max-update", 9, "--save-interval-updates", 4]
    fairseq_train(lstm(tiny_corpus, whole, *options), workers=2)
    restore = ["--restore-file", whole / "checkpoint_1_4.pt"]
    resumed = fairseq_train(lstm(tiny_corpus, rest, *options, *restore), workers=2)
    steps = [r["num_updates"] for r in json_log(resumed.stdout) if r["tag"] == "train_inner"]
    assert steps == [5, 6, 7, 8, 9]
    expected, found = model_of(whole), model_of(rest)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_one_worker_under_torchrun_is_a_single_process(tiny_corpus, tmp_path):
    arguments = [*lstm(tiny_corpus, tmp_path, "--max-update", 2), "--user-dir", PACKAGE]
    result = run_module("fairseq_cli.train", arguments, workers=1)
    assert "distributed init" not in result.stdout
    assert [r["num_updates"] for r in json_log(result.stdout) if r["tag"] == "train_inner"] == [1, 2]


@pytest.mark.slow
def test_hydra_joins_torchrun(tiny_corpus, tmp_path):
    """join_late_under_hydra: the same as one process with an update frequency of two."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_module(
        "fairseq_cli.hydra_train",
        hydra_arguments(tiny_corpus, one, "optimization.max_update=5", "optimization.update_freq=[2]"),
        cwd=tmp_path,
    )
    double = run_module(
        "fairseq_cli.hydra_train",
        hydra_arguments(tiny_corpus, two, "optimization.max_update=5"),
        workers=2,
        cwd=tmp_path,
    )
    steps = [r["num_updates"] for r in json_log(double.stdout) if r["tag"] == "train_inner"]
    assert steps == [1, 2, 3, 4, 5]
    ours, theirs = model_of(one), model_of(two)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_validation_gathers_on_the_cpu(tiny_corpus, tmp_path):
    """gather_objects_on_cpu: fairseq-validate with two workers gives the loss of one."""
    fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 2))
    arguments = [tiny_corpus, "--task", "language_modeling", "--max-tokens", 48]
    arguments += ["--tokens-per-sample", 12, "--path", tmp_path / "checkpoint_last.pt"]
    arguments += ["--log-format", "json", "--user-dir", PACKAGE]
    losses = []
    for workers in (None, 2):
        result = run_module("fairseq_cli.validate", arguments, workers=workers)
        losses.append([r["valid_loss"] for r in json_log(result.stdout) if "valid_loss" in r])
    assert losses[0] == losses[1][:1] and losses[0]


@pytest.mark.slow
def test_evaluation_and_tensorboard_in_one_process(tiny_corpus, tmp_path):
    """fairseq-eval-lm works as before, and --tensorboard-logdir needs no tensorboardX."""
    events = tmp_path / "events"
    options = ["--max-update", 2, "--tensorboard-logdir", events]
    trained = fairseq_train(lstm(tiny_corpus, tmp_path, *options))
    assert trained.stderr == ""  # silence_known_warnings
    assert list((events / "train_inner").glob("events.out.tfevents.*"))
    arguments = [tiny_corpus, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "valid"]
    arguments += ["--sample-break-mode", "eos", "--user-dir", PACKAGE]
    result = run_module("fairseq_cli.eval_lm", arguments)
    assert re.search(r"Evaluated \d+ tokens", result.stdout + result.stderr)
