"""fairseq-eval-lm, -generate, -interactive and -validate take the task and its options from the checkpoint.

fairseq selects the task before it opens a checkpoint. Without ``--task`` a character model was evaluated as
``language_modeling``, and a translation model without its languages. Both ended in a traceback.
"""

import argparse
import dataclasses
import functools
import logging
import os

from rhhn_fairseq.compat.checkpoints import WeightsOnlyTorch
from rhhn_fairseq.compat.recipes import given_options, is_command_line
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

logger = logging.getLogger("rhhn_fairseq.recipes")

# fairseq-validate requires one of these, and the training run has set one.
SIZES = ("batch_size", "max_tokens")


def taken_from_checkpoint(parser: argparse.ArgumentParser, arguments, then):
    """Makes the task and its options in the checkpoint of ``--path`` the defaults of programs that read it.

    If ``--task`` is given, fairseq's defaults are unchanged. Without ``--path``, three of these programs end
    in a traceback; here the error is one line. Returns what to call before each pass; that calls ``then``.
    """
    reads = {"path", "task"} <= {action.dest for action in parser._actions}
    return _Stored(arguments, then) if reads else then


class _Stored:
    """Sets a parser's defaults to what the first checkpoint of ``--path`` holds."""

    def __init__(self, arguments, then):
        self.arguments, self.then, self.defaults = arguments, then, None

    def __call__(self, parser):
        if self.then is not None:
            self.then(parser)
        if self.defaults is None:
            given = given_options(parser, self.arguments)
            if not given.get("path", parser.get_default("path")) and is_command_line(self.arguments):
                raise UsageError(
                    "--path is missing: name a checkpoint, such as checkpoints/checkpoint_best.pt"
                )
            check_ensemble(given)
            self.defaults = {} if "task" in given else stored_defaults(given)
            # Programs with a search, and fairseq-eval-lm, have their own batch sizes.
            own = any(action.dest in ("beam", "output_word_probs") for action in parser._actions)
            if own or any(name in given for name in SIZES):
                self.defaults = {key: value for key, value in self.defaults.items() if key not in SIZES}
            if "sacrebleu" in given and "scoring" not in given:
                # fairseq has no other use for the option.
                self.defaults |= {"scoring": "sacrebleu"}
            # fairseq-validate computes the checkpoint's loss, so it takes the options of that loss.
            if not own and "criterion" not in given and given.get("path"):
                self.defaults |= stored_criterion(given)
        parser.set_defaults(**self.defaults)


def stored_criterion(given: dict) -> dict[str, str]:
    """Returns the criterion of the first checkpoint of ``--path``; {} for one that does not say."""
    from fairseq.utils import split_paths

    path = split_paths(given["path"])[0]
    criterion = _configuration(path).get("criterion") if os.path.isfile(path) else None
    name = criterion.get("_name") if isinstance(criterion, dict) else criterion
    return {"criterion": name} if isinstance(name, str) else {}


def stored_defaults(given: dict) -> dict[str, object]:
    """Returns task, task options and batch size of the checkpoint that ``--path`` names; {} without one.

    Raises:
        UsageError: the file cannot be read, or its task is not registered.
    """
    from fairseq.checkpoint_utils import get_maybe_sharded_checkpoint_filename
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from fairseq.utils import split_paths

    if not given.get("path"):
        return {}
    path = get_maybe_sharded_checkpoint_filename(
        split_paths(given["path"])[0],
        given.get("checkpoint_suffix", ""),
        0,
        given.get("checkpoint_shard_count", 1),
    )
    cfg = _configuration(path)
    task = _task(cfg)
    name = task.get("_name") or task.get("task")
    if not name:
        return {}
    if name not in TASK_REGISTRY:
        raise UsageError(
            f"checkpoint {path} is of the task {name}, which is not known here: give --user-dir with the "
            "directory that has it, or --task"
        )
    sizes = cfg.get("dataset") or task
    stored = {"task": name} | {key: sizes.get(f"{key}_valid") or sizes.get(key) for key in SIZES}
    config = TASK_DATACLASS_REGISTRY.get(name)
    for spec in dataclasses.fields(config) if config else ():
        # A value that refers to another option, such as the seed, is this program's, not the training run's.
        other = isinstance(spec.default, str) and spec.default.startswith("${")
        if spec.name in task and spec.name not in ("_name", "data") and not other:
            stored[spec.name] = task[spec.name]
    logger.info("--task %s and its options come from %s", name, path)
    return stored


def check_ensemble(given: dict) -> None:
    """Raises UsageError unless all checkpoints of ``--path`` do the same.

    fairseq takes the task and the languages from the first. It would average translations into different
    languages.
    """
    from fairseq.utils import split_paths

    first, *others = split_paths(given.get("path") or "")
    # A checkpoint in shards has one configuration in each of its files.
    if not others or given.get("checkpoint_shard_count", 1) > 1 or given.get("checkpoint_suffix"):
        return
    what = _purpose(first)
    for path in others:
        if _purpose(path) != what:
            raise UsageError(f"--path: {first} is for {what}, {path} for {_purpose(path)}; all must agree")


def _purpose(path: str) -> str:
    """Returns what a checkpoint is for: a translation from one language to another, or its task."""
    task = _task(_configuration(path))
    source, target = task.get("source_lang"), task.get("target_lang")
    if source and target:
        return f"translation from {source} to {target}"
    return str(task.get("_name") or task.get("task"))


def _task(cfg: dict) -> dict:
    """Returns the task's options; fairseq's older tasks have a namespace for them."""
    task = cfg.get("task") or {}
    return vars(task) if isinstance(task, argparse.Namespace) else task


def _configuration(path: str) -> dict:
    """Returns a checkpoint's configuration as a dictionary; for an old one, all its options as the task's."""
    refuse_endless(path)
    try:
        stat = os.stat(path)
        cfg, args = _read(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise UsageError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error
    return cfg or {"task": vars(args) if args else {}}


@functools.lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> tuple:
    """Returns a checkpoint's ``cfg`` and ``args``; tensors stay on disk. fairseq-validate asks repeatedly."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    state = WeightsOnlyTorch.load(path, map_location="cpu", mmap=zipped)
    return state.get("cfg"), state.get("args")
