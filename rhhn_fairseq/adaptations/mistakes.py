"""Maps exceptions that fairseq, OmegaConf and PyTorch raise for a user's mistake to one-line messages.

A row of MISTAKES gives the exception's type, the module that raises it, a pattern for its message, and the
line to print. Exceptions without a row keep their traceback, because they are defects, not mistakes.
"""

import difflib
import errno
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rhhn_fairseq.adaptations.names import nearest


@dataclass(frozen=True)
class Mistake:
    """A row of MISTAKES.

    Args:
        kind: names of exceptions, separated by |. module: pattern for the raising module's whole name.
        message: pattern for the beginning of the message. line: what to print instead, with references to
            groups (`\\1`) of the message, or a function of the exception and the match. The function returns
            None if the row does not fit the exception.
    """

    kind: str
    module: str
    message: str
    line: str | Callable[[BaseException, re.Match], str | None]

    def describe(self, error: BaseException, module: str) -> str | None:
        """Returns the line for an exception raised in `module`, or None if this row does not match it."""
        names = {kind.__name__ for kind in type(error).__mro__}
        if not names & set(self.kind.split("|")) or not re.fullmatch(self.module, module):
            return None
        match = re.match(self.message, str(error), re.DOTALL)
        if match is None:
            return None
        text = match.expand(self.line) if isinstance(self.line, str) else self.line(error, match)
        return None if text is None else " ".join(text.split()).rstrip(":,; ")


def describe(error: BaseException) -> str | None:
    """Returns the line for a caught exception, or None if it is not a user's mistake."""
    module = raising_module(error)
    lines = (row.describe(error, module) for row in MISTAKES)
    return next((line for line in lines if line is not None), None)


def _frames(error: BaseException) -> list[FrameType]:
    """Returns the frames of an exception's traceback, the one that raised it last."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def raising_module(error: BaseException) -> str:
    """Returns the name of the module whose code raised an exception."""
    frames = _frames(error)
    return _module(frames[-1]) if frames else ""


def _passed_through(error: BaseException, module: str) -> bool:
    """Returns whether an exception was raised in a module or in what the module called."""
    return any(_module(frame) == module for frame in _frames(error))


def _module(frame: FrameType) -> str:
    names = frame.f_globals
    name = names.get("__name__", "")
    # ``python -m fairseq_cli.train`` runs that module under another name.
    return getattr(names.get("__spec__"), "name", name) if name == "__main__" else name


def _no_split(error, match) -> str:
    split, folder = match[1], match[2]
    splits = (
        {path.name.split(".")[0] for path in Path(folder).glob("*.idx")} if os.path.isdir(folder) else set()
    )
    return f"{folder} holds no data set {split}: {nearest(split, splits)}"


def _no_file(error, match) -> str:
    verb = "written" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else "read"
    return f"{error.filename or 'a file'}: cannot be {verb} ({error.strerror})"


def _not_written(error, match) -> str:
    return f"{error.filename or 'a file'}: cannot be written ({error.strerror})"


def _no_name(error, match) -> str:
    # fairseq has one function for all its registries; only its local variables say which one it is.
    local = _frames(error)[-1].f_locals
    return f"there is no {local['registry_name']} {match[1]!r}: {nearest(match[1], local['REGISTRY'])}"


def _no_sentence(error, match) -> str | None:
    local = _frames(error)[-1].f_locals
    # fairseq-generate counts sentences; a criterion has a list with an entry for every batch.
    if local.get("num_sentences", 0) or local.get("logging_outputs", ()):
        return None
    limits = "longer than --max-source-positions or --max-target-positions allow"
    data = local["cfg"].dataset if "cfg" in local else None
    if data is None or data.num_shards < 2:
        return f"no sentence is left: all are {limits}"
    return (
        f"no sentence is left for --shard-id {data.shard_id}: the data set has fewer batches than "
        f"--num-shards {data.num_shards}, or sentences are {limits}"
    )


def _no_prefix(error, match) -> str | None:
    settings = _frames(error)[-1].f_locals.get("cfg")
    if settings is None or settings.generation.prefix_size < 1:
        return None
    return "--prefix-size needs references, and the data set has none"


def _no_reference(error, match) -> str | None:
    if not _passed_through(error, "fairseq.sequence_scorer"):
        return None
    return "--score-reference needs references, and the data set has none"


def _too_long(error, match) -> str:
    number, sizes, limits = match.groups()
    # Source and target, as (np.int32(12), np.int32(9)); without references the second is 0.
    lengths = " and ".join(size for size in re.findall(r"\b\d+\b", sizes) if size != "0")
    # fairseq-interactive counts anew whenever it has read --buffer-size lines.
    is_typed = _passed_through(error, "fairseq_cli.interactive")
    sentence = "a line" if is_typed else f"sentence {number} of the data set, counted from 0,"
    return (
        f"{sentence} has {lengths} tokens, more than the model takes ({limits}): raise "
        "--max-source-positions and --max-target-positions, or give --skip-invalid-size-inputs-valid-test"
    )


def _configuration(error, match) -> str:
    key = getattr(error, "full_key", None)
    if type(error).__name__ == "MissingMandatoryValue" and key:
        return f"{key} has no value: give --{str(key).split('.')[-1].replace('_', '-')}"
    parent = getattr(error, "parent_node", None)
    known = [] if parent is None or "not in" not in str(error) else parent
    where = f"{key}: " if key else ""
    reason = str(error).splitlines()[0]
    return f"the configuration cannot be used: {where}{reason} {nearest(str(key).split('.')[-1], known)}"


def _composition(error, match) -> str:
    missing = getattr(error, "missing_cfg_file", None)
    if missing:
        group, _, name = str(missing).rpartition("/")
        return f"there is no {group} {name!r}: {nearest(name, error.options or ())}"
    cause = error.__cause__
    if cause is None or getattr(cause, "parent_node", None) is None:
        return f"the configuration cannot be used: {str(error).split('See https:')[0]}"
    key = str(cause.full_key)
    # Options of this package's tasks and models are missing until they are added, and have similar names.
    close = difflib.get_close_matches(key.split(".")[-1], map(str, cause.parent_node), n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"the configuration has no {key}: {hint}+{key}=... adds it"


DICTIONARY = "a dictionary such as \"{'dropout': 0.1}\""
OVERRIDES = f"--model-overrides, --optimizer-overrides and --update2lr take {DICTIONARY}"

MISTAKES = (
    # Data directories.
    Mistake(
        "Exception",
        r"fairseq\.tasks\.translation(_.*)?",
        "Could not infer language pair",
        "the data directory holds no data sets named SPLIT.SOURCE-TARGET.LANGUAGE: name the directory that "
        "rhhn prepare made, or give --source-lang and --target-lang",
    ),
    Mistake("FileNotFoundError", r"fairseq\.tasks\..*", r"Dataset not found: (\S*) \((.*)\)", _no_split),
    Mistake(
        "AttributeError",
        r"fairseq_cli\.eval_lm",
        r"'(\w+)' object has no attribute 'eval_lm_dataloader'",
        r"the checkpoint holds no language model (its task is \1): fairseq-validate evaluates it, and "
        "fairseq-generate a translation model",
    ),
    Mistake(
        "AssertionError",
        r"fairseq\.data\.language_pair_dataset",
        "Source and target must contain the same number",
        "the two sides of a data set have different numbers of sentences: prepare the data again",
    ),
    Mistake(
        "OSError", r"fairseq\.(tasks|data|utils|options)\b.*|fairseq_cli\..*|fileinput", r"\[Errno", _no_file
    ),
    Mistake(
        "OSError", r"fairseq\.(checkpoint_utils|file_io)|os|logging|<frozen os>", r"\[Errno", _not_written
    ),
    Mistake(
        "Exception",
        r"fairseq\.(tasks\.fairseq_task|data\.data_utils)",
        r"Size of sample #(\S+) is invalid \(=(.*?)\) since (max_positions=.*?), skip",
        _too_long,
    ),
    Mistake(
        "AssertionError",
        r"fairseq\.data\.data_utils(_fast)?",
        r"[Ss]entences? lengths? should not exceed max_tokens=(\d+)",
        r"--max-tokens or --max-tokens-valid \1 is less than the longest sentence: raise it, or leave long "
        "sentences out with --max-source-positions, --max-target-positions and "
        "--skip-invalid-size-inputs-valid-test",
    ),
    Mistake("OSError", r"fairseq\.file_utils", r"file (.*) not found", r"\1: there is no such file"),
    Mistake(
        "RuntimeError",
        r"fairseq\.data\.iterators",
        "Cannot resume training due to dataloader mismatch",
        "the checkpoint was saved in mid-epoch, after more batches than an epoch of this run has: resume "
        "with the same batch size, or give --reset-dataloader to begin again at epoch 1",
    ),
    Mistake(
        "Exception",
        r"fairseq\.data\.iterators",
        "The dataset is empty",
        "there are no batches: a data set is empty, or each of its sentences is longer than --max-tokens",
    ),
    Mistake(
        "ValueError",
        r"fairseq\.data\.data_utils",
        r"Valid paths \{(.+)\} will be ignored|.*--ignore-unused-valid-subsets",
        "the data directory holds validation sets that --valid-subset does not name: name them, or give "
        "--combine-valid-subsets or --ignore-unused-valid-subsets",
    ),
    Mistake(
        "Exception",
        r"fairseq\.data\.dictionary",
        r"Incorrect encoding detected in (.*), please rebuild",
        r"\1: is not UTF-8; prepare the data again",
    ),
    Mistake(
        "RuntimeError",
        r"torch\.nn\.modules\.module",
        r"Error\(s\) in loading state_dict for \w+:\s*(.{1,200})",
        r"the checkpoint does not fit its model: \1",
    ),
    # Batches and sizes.
    Mistake("AssertionError", r"fairseq_cli\..*", r"(\S.*)", r"\1"),
    Mistake("ValueError", r"fairseq_cli\..*|numpy.*", r"(Seed must be between .*)", r"common.seed: \1"),
    Mistake(
        "RuntimeError|MemoryError",
        r"torch\..*|rhhn_fairseq\.(ops|cells|layers|models)\..*|fairseq\..*",
        r".*?(you tried to allocate (\d+) bytes|Storage size calculation overflowed|CUDA out of memory)",
        r"there is not enough memory: \1; take a smaller model, --max-tokens, --batch-size or --beam",
    ),
    Mistake(
        "MemoryError",
        r"(numpy|rhhn_fairseq)\b.*",
        r"(Unable to allocate .*? for an array)",
        r"there is not enough memory: \1",
    ),
    Mistake(
        "AssertionError",
        r"fairseq\.distributed\.utils",
        r"world size is (\d+) but have (\d+) available devices",
        r"--distributed-world-size \1: this machine has \2 GPUs; torchrun --nproc-per-node \1 -m "
        r"fairseq_cli.train starts \1 processes, on CPUs too",
    ),
    # Names and combinations.
    Mistake("KeyError", r"fairseq\.registry", r"'(\S+)'$", _no_name),
    Mistake("ValueError", r"fairseq\.registry", r"(\w+) is required!", r"no \1 is named: give --\1"),
    Mistake(
        "AssertionError",
        r"fairseq\.trainer",
        r"Optimizer does not match.*? (\w*(?:FP16|AMP)Optimizer vs \w+|\w+ vs \w*(?:FP16|AMP)Optimizer)",
        r"the checkpoint's training had another precision (\1): give the same of --bf16, --fp16, --amp, "
        "--memory-efficient-bf16 and --memory-efficient-fp16, or --reset-optimizer",
    ),
    Mistake(
        "ValueError",
        r"fairseq\.checkpoint_utils",
        "--finetune-from-model and --restore-file",
        "--finetune-from-model and --restore-file exclude each other; leave one of them out",
    ),
    Mistake(
        "ValueError|AssertionError|NotImplementedError|ImportError",
        r"fairseq\.(optim|trainer|tasks\.fairseq_task|search|sequence_generator|data\.iterators|checkpoint_utils|"
        r"scoring|models\.distributed_fairseq_model|distributed)\b.*",
        r"(.*(--\w|[Pp]lease|Cannot|Invalid|requires|must|incompatible|not match|[Uu]nknown).*)",
        r"\1",
    ),
    Mistake(
        "ZeroDivisionError|AssertionError",
        r"fairseq\.optim\.lr_scheduler\..*",
        r"$|.*division",
        "the learning rate's schedule takes numbers of updates of 1 and more, --warmup-updates and such",
    ),
    Mistake(
        "KeyError",
        r"fairseq\.(trainer|checkpoint_utils)|torch\.optim\.optimizer",
        r"'(extra_state|optimizer_history|train_iterator|epoch|num_updates|criterion_name|optimizer_name|"
        r"param_groups)'",
        r"the checkpoint does not hold its \1, so training cannot go on from it",
    ),
    Mistake(
        "KeyError",
        r"fairseq\.checkpoint_utils",
        r"'best_loss'",
        "the checkpoint does not hold its optimizer_history, or no lr_scheduler_state in it; "
        "fairseq needs both",
    ),
    Mistake(
        "IndexError",
        r"fairseq\.(trainer|checkpoint_utils)",
        "list index out of range",
        "the checkpoint's optimizer_history is empty, so training cannot go on from it",
    ),
    Mistake(
        "KeyError",
        r"fairseq_cli\.train",
        r"'(\S+)'$",
        r"--best-checkpoint-metric \1: the validation logs no such figure, see the log's valid lines",
    ),
    Mistake(
        "NotImplementedError",
        r"fairseq\.data\.data_utils",
        "Unknown post_process option: (.*)",
        r"--post-process \1 is unknown, choose from sentencepiece, subword_nmt, wordpiece, letter, silence",
    ),
    Mistake(
        "ValueError",
        r"fairseq\.options",
        r"Cannot combine --fp16 and --tpu",
        "--fp16 and --tpu exclude each other: TPUs take --bf16",
    ),
    Mistake(
        "ZeroDivisionError",
        r"fairseq_cli\.generate|fairseq\.criterions\..*",
        "",
        _no_sentence,
    ),
    Mistake(
        "TypeError",
        r"fairseq_cli\.generate",
        "'NoneType' object is not subscriptable",
        _no_prefix,
    ),
    Mistake(
        "TypeError",
        r"torch\.nn\.modules\.module",
        r".*missing 1 required positional argument: 'prev_output_tokens'",
        _no_reference,
    ),
    Mistake(
        "UnicodeDecodeError", "codecs", r"'utf-8' codec can't decode (.*)", r"the input is not UTF-8: \1"
    ),
    # Tokenizers and pieces.
    Mistake("ImportError", r"fairseq\.data\.encoders\..*", r"(Please .*)", r"\1"),
    Mistake(
        "ModuleNotFoundError",
        r"fairseq\..*",
        r"No module named '(\S+)'",
        r"the package \1, which this option needs, is not installed",
    ),
    Mistake(
        "RuntimeError",
        "sentencepiece",
        r".*could not parse ModelProto from (.*)",
        r"\1: is not a model of sentencepiece",
    ),
    # Values that are read as Python.
    Mistake(
        "ValueError|SyntaxError",
        r"ast|fairseq_cli\..*|fairseq\.checkpoint_utils|<unknown>",
        r"(malformed node|.*invalid syntax|unexpected EOF|.*was never closed|.*leading zeros|.*unterminated)",
        OVERRIDES,
    ),  # fmt: skip
    Mistake(
        "ValueError", r"json\.decoder", r"(Expecting .*)", r"an option takes JSON such as '{\"beam\": 4}': \1"
    ),
    Mistake(
        "ValueError",
        r"fairseq\.optim(\..*)?",
        r"Unsupported optimizer: (\S+)",
        r"--memory-efficient-bf16 and --memory-efficient-fp16 do not support the optimizer \1; take adam",
    ),
    Mistake(
        "AssertionError",
        r"fairseq\.optim\.lr_scheduler\..*",
        r"Pass-through schedule can only be used",
        "--lr-scheduler pass_through needs --optimizer composite, whose parts have schedules of their own",
    ),
    Mistake("SyntaxError", "ast", "", OVERRIDES),
    Mistake(
        "TypeError",
        r"fairseq_cli\.validate|fairseq\.optim\.fairseq_optimizer",
        r"'\w+' object is not iterable|object of type '\w+' has no len",
        OVERRIDES,
    ),
    Mistake(
        "NameError",
        r"fairseq_cli\.(eval_lm|validate)",
        r"name '(.*?)' is",
        r"--model-overrides \1: it takes " + DICTIONARY,
    ),
    Mistake(
        "InterpolationKeyError|InterpolationResolutionError|UnsupportedInterpolationType|GrammarParseError|"
        "MissingMandatoryValue|ValidationError|ConfigKeyError",
        r"(omegaconf|fairseq|rhhn_fairseq|fairseq_cli)\b.*",
        "",
        _configuration,
    ),
    Mistake("CompactHydraException", r"hydra\..*", "", _composition),
)
