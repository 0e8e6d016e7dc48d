"""Refuses in one line each of fairseq's options that would have no effect, or another than it says."""

import functools
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from rhhn_fairseq.errors import UsageError

JOINED_BY_EVAL_LM = (None, "subword_nmt", "@@ ")


@dataclass(frozen=True)
class Refusal:
    """An option, when it is refused, and the reason, which follows the option in the message."""

    option: str
    applies: Callable[[Namespace], bool]
    reason: str


def _searches_data(args: Namespace) -> bool:
    """Returns whether the program is fairseq-generate, whose sentences come from a data directory."""
    return hasattr(args, "beam") and not hasattr(args, "buffer_size")


def _compares_validations(args: Namespace) -> bool:
    """Returns whether validation figures decide when to stop, what to keep or how fast to learn."""
    plateaus = args.lr_scheduler == "reduce_lr_on_plateau"
    return args.patience > 0 or args.keep_best_checkpoints > 0 or plateaus


def _reads_input(args: Namespace) -> bool:
    """Returns whether the program is fairseq-interactive."""
    return hasattr(args, "buffer_size")


def _changes_averages(name: str, args: Namespace) -> bool:
    """Returns whether an option of the averaged weights is given, by its value, although none are kept."""
    from fairseq.dataclass.configs import EMAConfig

    default = getattr(EMAConfig, name)
    return getattr(args, name, default) != default and not args.store_ema


def _scores_by_product(args: Namespace) -> bool:
    """Returns whether the attention's score is a product of query and source, without a hidden layer."""
    return getattr(args, "attention_score", None) == "general"


OF_AVERAGES = ("ema_decay", "ema_start_update", "ema_seed_model", "ema_update_freq", "ema_fp32")

REFUSALS = (
    *(
        Refusal(
            "--" + name.replace("_", "-"),
            functools.partial(_changes_averages, name),
            "has no effect without --store-ema, which keeps averages of the weights",
        )
        for name in OF_AVERAGES
    ),
    Refusal(
        "--attention-size",
        lambda args: _scores_by_product(args) and getattr(args, "attention_size", 0),
        "is the width of the additive score's hidden layer; --attention-score general has none",
    ),
    Refusal(
        "--attention-normalised",
        lambda args: _scores_by_product(args) and getattr(args, "attention_normalised", False),
        "goes with --attention-score additive only",
    ),
    Refusal(
        "--disable-validation",
        lambda args: hasattr(args, "max_update") and args.disable_validation and _compares_validations(args),
        "gives no figures, which --patience, --keep-best-checkpoints and reduce_lr_on_plateau compare",
    ),
    Refusal(
        "--replace-unk",
        lambda args: _searches_data(args) and args.replace_unk is not None and args.dataset_impl != "raw",
        "copies words of the source text, which binary data do not contain: give --dataset-impl raw with raw "
        "data, or use fairseq-interactive",
    ),
    Refusal(
        "--constraints",
        lambda args: _searches_data(args) and args.constraints is not None,
        "stand behind the sentences in the input of fairseq-interactive; data directories have none",
    ),
    Refusal(
        "--score-reference",
        lambda args: _reads_input(args) and args.score_reference,
        "scores the translations of a data directory, and the input of fairseq-interactive has none",
    ),
    Refusal(
        "--num-shards",
        lambda args: (
            getattr(args, "num_shards", 1) > 1
            and not (_searches_data(args) or hasattr(args, "output_word_probs"))
        ),
        "divides the sentences of fairseq-generate; torchrun divides those of fairseq-train and -validate",
    ),
    Refusal(
        "--post-process",
        lambda args: hasattr(args, "output_word_probs") and args.post_process not in JOINED_BY_EVAL_LM,
        "in fairseq-eval-lm joins the pieces of subword_nmt only; leave it out for a model of characters",
    ),
)


def check(args: Namespace) -> None:
    """Raises UsageError for the first option that is refused.

    fairseq-generate ignores ``--num-shards``; here it translates the share that the option names.
    """
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise UsageError(f"{refusal.option} {refusal.reason}")
    if _searches_data(args):
        _divide_sentences(args)


def _divide_sentences(args: Namespace) -> None:
    """Copies ``--num-shards`` and ``--shard-id`` to the options of trainings, which fairseq-generate reads.

    Raises:
        UsageError: torchrun started several workers, each of which would translate all sentences.
    """
    if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "fairseq-generate runs without torchrun, where every worker would translate all sentences; "
            "divide them by --num-shards and --shard-id"
        )
    if args.num_shards > 1:
        args.distributed_world_size, args.distributed_rank = args.num_shards, args.shard_id
