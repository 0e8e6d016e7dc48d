"""What a command line of fairseq's programs leaves out comes from a recipe, or from a checkpoint.

fairseq-train completes ``--arch NAME`` from the architecture's recipe. fairseq-eval-lm, -generate,
-interactive and -validate take the task and its options from the checkpoint. fairseq selects the task before
it opens one: a character model was evaluated as ``language_modeling``, and a translation model without its
languages.
"""

import argparse
import copy
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Iterable, Sequence

from rhhn_fairseq.compat import names, ranges, recipes
from rhhn_fairseq.compat.checkpoints import WeightsOnlyTorch
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

logger = logging.getLogger("rhhn_fairseq.recipes")

HELP = {"-h", "--help", "--help-all"}
# What --help of a training shows; --help-all shows every option.
FIRST = """
data arch user_dir save_dir source_lang target_lang problem cell hidden_size layers hyper_size
embed_dim recurrent_dropout output_dropout dropout window mixtures batch_size max_tokens
tokens_per_sample update_freq max_epoch max_update patience optimizer lr lr_scheduler warmup_updates
clip_norm seed cpu bf16 fp16 num_workers save_interval_updates no_epoch_checkpoints restore_file
finetune_from_model log_file tensorboard_logdir
""".split()
# fairseq-validate requires one of these, and the training run has set one.
SIZES = ("batch_size", "max_tokens")


class Defaults:
    """Sets a parser's defaults before each of fairseq's passes over a command line.

    fairseq parses it first to find task, criterion, optimizer and scheduler, then with their options. It
    would answer ``--help`` at the first pass, without an option of the model, the task or the criterion. Here
    the answer waits for the second where the line names the architecture, or the task.

    Attributes:
        arch: the architecture on the command line. filled: what its recipe set at the last pass.
    """

    def __init__(self, parser: argparse.ArgumentParser, arguments, then):
        # The parser was created before the plugin was loaded. argparse would print all options of the
        # program, about a hundred lines, before an error.
        parser.error = functools.partial(names.end_in_one_line, parser)
        names.complete(parser, skip=1)
        self.then, self.passes, self.stored = then, 0, {}
        self.arguments = [str(word) for word in (sys.argv[1:] if arguments is None else arguments)]
        # A caller of fairseq's parser may add options later, and help needs none.
        self.is_whole = arguments is None and not HELP & set(self.arguments)
        self.arch, self.filled = None, {}
        known = {action.dest for action in parser._actions}
        # fairseq-generate has an --arch as well, but does not use it.
        self.trains, self.reads = "max_update" in known, {"path", "task"} <= known
        deciding = ("--arch", "-a") if self.trains else ("--task",)
        named = any(word.partition("=")[0] in deciding for word in self.arguments)
        self.help = HELP & set(self.arguments) if named else set()

    def __call__(self, parser: argparse.ArgumentParser) -> None:
        if self.then is not None:
            self.then(parser)
        given = given_options(parser, self.arguments)
        if self.trains:
            self._fill(parser, given)
            _shorten_help(parser)
        elif self.reads:
            if self.passes == 0:
                self.stored = self._stored(parser, given)
            parser.set_defaults(**self.stored)
        if self.passes == 0:
            self.help = {word: parser._option_string_actions.pop(word) for word in self.help}
        else:
            parser._option_string_actions.update(self.help)
        self.passes += 1

    def check(self, namespace: argparse.Namespace) -> None:
        """Logs what a recipe filled in, and checks the options of the line."""
        if self.trains:
            recipes.announce(self.arch, self.filled)
        if hasattr(namespace, "beam") and not hasattr(namespace, "buffer_size") and namespace.num_shards > 1:
            # fairseq-generate ignores --num-shards; here it translates the share that the option names.
            namespace.distributed_world_size = namespace.num_shards
            namespace.distributed_rank = namespace.shard_id
        ranges.check_command_line(namespace)

    def _fill(self, parser, given: dict) -> None:
        self.arch = given.get("arch", parser.get_default("arch"))
        if self.arch is None and self.is_whole:
            raise UsageError(f"--arch is missing: name an architecture, {recipes.ARCHITECTURES}")
        self.filled = recipes.fill(self.arch, given)
        if self.passes == 0:
            self.filled = {kind: self.filled[kind] for kind in recipes.COMPONENTS if kind in self.filled}
        parser.set_defaults(**self.filled)

    def _stored(self, parser, given: dict) -> dict:
        if not given.get("path", parser.get_default("path")) and self.is_whole:
            raise UsageError("--path is missing: name a checkpoint, such as checkpoints/checkpoint_best.pt")
        # A checkpoint in shards has one configuration in each of its files.
        if given.get("checkpoint_shard_count", 1) == 1 and not given.get("checkpoint_suffix"):
            check_ensemble((given.get("path") or "").split(os.pathsep))
        stored = {} if "task" in given else stored_defaults(given)
        # Programs with a search, and fairseq-eval-lm, have their own batch sizes.
        own = any(action.dest in ("beam", "output_word_probs") for action in parser._actions)
        if own or any(name in given for name in SIZES):
            stored = {key: value for key, value in stored.items() if key not in SIZES}
        if "sacrebleu" in given and "scoring" not in given:
            # fairseq has no other use for the option.
            stored |= {"scoring": "sacrebleu"}
        # fairseq-validate computes the checkpoint's loss, so it takes the options of that loss.
        if not own and "criterion" not in given and given.get("path"):
            stored |= stored_criterion(given)
        return stored


def given_options(parser: argparse.ArgumentParser, arguments: Iterable[str]) -> dict[str, object]:
    """Returns by name the values of the options on a command line that the parser knows."""
    # fairseq itself answers --help.
    arguments = [argument for argument in arguments if argument not in HELP]
    kept = [(action, action.default, action.required) for action in parser._actions]
    defaults, parser._defaults = parser._defaults, {}
    for action, _, _ in kept:
        action.default, action.required = argparse.SUPPRESS, False
    try:
        return vars(parser.parse_known_args(arguments)[0])
    finally:
        parser._defaults = defaults
        for action, default, required in kept:
            action.default, action.required = default, required


def stored_criterion(given: dict) -> dict[str, str]:
    """Returns the criterion of the first checkpoint of ``--path``; {} for one that does not say."""
    from fairseq.utils import split_paths

    path = split_paths(given["path"])[0]
    criterion = _configuration(path).get("criterion") if os.path.isfile(path) else None
    name = criterion.get("_name") if isinstance(criterion, dict) else criterion
    return {"criterion": name} if isinstance(name, str) else {}


def _shorten_help(parser: argparse.ArgumentParser) -> None:
    """Makes ``--help`` print the options of ``FIRST``, and ``--help-all`` all of them, some 700 lines."""
    if "--help-all" in parser._option_string_actions:
        return
    whole = parser.add_argument("--help-all", action="help", help="show all options")
    everything = parser.format_help

    def first() -> str:
        formatter = argparse.HelpFormatter(parser.prog, max_help_position=34, width=110)
        formatter.add_usage("%(prog)s DATA --arch NAME [option ...]", [], [])
        formatter.start_section("options")
        shown = {action.dest: action for action in parser._actions}
        for action in (*(shown[name] for name in FIRST if name in shown), whole):
            brief = copy.copy(action)
            text = (action.help or "").partition("; ")[0].partition(". ")[0]
            brief.help = text if len(text) < 70 else f"{text[:68].rpartition(' ')[0]} ..."
            if action.option_strings and action.nargs != 0:
                brief.choices, brief.metavar = None, "NAME" if action.choices else "X"
            formatter.add_argument(brief)
        formatter.end_section()
        return formatter.format_help()

    parser.format_help = lambda: everything() if "--help-all" in sys.argv else first()


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
    suffix, shards = given.get("checkpoint_suffix", ""), given.get("checkpoint_shard_count", 1)
    path = get_maybe_sharded_checkpoint_filename(split_paths(given["path"])[0], suffix, 0, shards)
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


def check_ensemble(checkpoints: Sequence[str]) -> None:
    """Raises UsageError for checkpoints that do not do the same, if they say what they do.

    fairseq takes the task and the languages from the first, and would average translations of others.
    """
    for path in checkpoints[1:]:
        what, other = _purpose(checkpoints[0]), _purpose(path)
        if what != other and None not in (what, other):
            raise UsageError(f"{checkpoints[0]} is for {what}, {path} for {other}; all must agree")


def _purpose(path: str) -> str | None:
    """Returns a checkpoint's task, or its languages; None if a translation's came from the data's names."""
    task = _task(_configuration(path))
    if "source_lang" not in task:
        return str(task.get("_name") or task.get("task"))
    source, target = task["source_lang"], task["target_lang"]
    return f"translation from {source} to {target}" if source and target else None


def _task(cfg: dict) -> dict:
    """Returns the task's options; fairseq's older tasks have a namespace for them."""
    task = cfg.get("task") or {}
    return vars(task) if isinstance(task, argparse.Namespace) else task


def _configuration(path: str) -> dict:
    """Returns a checkpoint's configuration as a dictionary; for an old one, all its options as the task's."""
    refuse_endless(path)
    stat = os.stat(path)
    cfg, args = _read(path, stat.st_mtime_ns, stat.st_size)
    return cfg or {"task": vars(args) if args else {}}


@functools.lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> tuple:
    """Returns a checkpoint's ``cfg`` and ``args``; tensors stay on disk. fairseq-validate asks repeatedly."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    state = WeightsOnlyTorch.load(path, map_location="cpu", mmap=zipped)
    return state.get("cfg"), state.get("args")
