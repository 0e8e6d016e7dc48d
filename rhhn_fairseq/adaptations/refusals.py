"""Refuses in one line each of fairseq's options that cannot work here.

Otherwise they end in an AssertionError, an ImportError or a KeyError from deep within fairseq.
"""

import functools
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rhhn_fairseq.adaptations import in_place_of
from rhhn_fairseq.errors import UsageError

JOINED_BY_EVAL_LM = (None, "subword_nmt", "@@ ")


@dataclass(frozen=True)
class Refusal:
    """An option, when it is refused, and the reason, which follows the option in the message."""

    option: str
    applies: Callable[[Namespace], bool]
    reason: str


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        # Its parent package is missing.
        return True


def _trains_ours(args: Namespace) -> bool:
    """Returns whether a model of this package is trained."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    model = ARCH_MODEL_REGISTRY.get(getattr(args, "arch", None))
    return model is not None and model.__module__.split(".")[0] == __name__.split(".")[0]


def _searches_data(args: Namespace) -> bool:
    """Returns whether the program is fairseq-generate, whose sentences come from a data directory."""
    return hasattr(args, "beam") and not hasattr(args, "buffer_size")


def _compares_validations(args: Namespace) -> bool:
    """Returns whether validation figures decide when to stop, what to keep or how fast to learn."""
    plateaus = args.lr_scheduler == "reduce_lr_on_plateau"
    return args.patience > 0 or args.keep_best_checkpoints > 0 or plateaus


def _on_cpu(args: Namespace) -> bool:
    return args.cpu or not torch.cuda.is_available()


def _translates_once(args: Namespace) -> bool:
    return _searches_data(args) and args.task in ("translation", "gnmt_translation")


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
        "--tpu",
        lambda args: args.tpu and not args.bf16 and _missing("torch_xla"),
        "needs the package torch_xla, which is not installed",
    ),
    Refusal(
        "--memory-efficient-fp16",
        lambda args: hasattr(args, "max_update") and args.memory_efficient_fp16 and _on_cpu(args),
        "trains on a GPU only; on a CPU use --bf16, or neither for float32",
    ),
    Refusal(
        "--profile",
        lambda args: getattr(args, "profile", False) and not torch.cuda.is_available(),
        "is CUDA's profiler and needs a GPU",
    ),
    Refusal(
        "--use-plasma-view",
        lambda args: getattr(args, "use_plasma_view", False) and _missing("pyarrow.plasma"),
        "needs the store plasma, which pyarrow no longer has",
    ),
    Refusal(
        "--pipeline-model-parallel",
        lambda args: (
            getattr(args, "pipeline_model_parallel", False)
            and (_trains_ours(args) or not (args.pipeline_balance or args.pipeline_encoder_balance))
        ),
        "cuts a model of fairseq's own into stages; no model here can be cut, use torchrun for several GPUs",
    ),
    Refusal(
        "--quantization-config-path",
        lambda args: getattr(args, "quantization_config_path", None) and _trains_ours(args),
        "quantises linear layers and embeddings of fairseq's transformer, which no model here has",
    ),
    Refusal(
        "--disable-validation",
        lambda args: hasattr(args, "max_update") and args.disable_validation and _compares_validations(args),
        "gives no figures, which --patience, --keep-best-checkpoints and reduce_lr_on_plateau compare",
    ),
    Refusal(
        "--write-checkpoints-asynchronously",
        lambda args: getattr(args, "write_checkpoints_asynchronously", False) and _missing("iopath"),
        "needs the package iopath, which is not installed",
    ),
    Refusal(
        "--fp16-adam-stats",
        lambda args: getattr(args, "fp16_adam_stats", False) and _missing("apex"),
        "needs Adam of the package apex, which is not installed",
    ),
    Refusal(
        "--zero-sharding os",
        lambda args: getattr(args, "zero_sharding", "none") == "os" and _missing("fairscale"),
        "needs the package fairscale, which is not installed",
    ),
    Refusal(
        "--ddp-backend fully_sharded",
        lambda args: getattr(args, "ddp_backend", "") == "fully_sharded" and _missing("fairscale"),
        "needs the package fairscale, which is not installed",
    ),
    Refusal(
        "--cpu-offload",
        lambda args: getattr(args, "cpu_offload", False) and args.ddp_backend != "fully_sharded",
        "goes with --ddp-backend fully_sharded only",
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
        "--print-alignment soft",
        lambda args: _reads_input(args) and args.print_alignment == "soft",
        "is written by fairseq-generate; fairseq-interactive takes hard",
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
        "--batch-size",
        lambda args: _reads_input(args) and (args.batch_size or 0) > max(args.buffer_size, 1),
        "must not be larger than --buffer-size, the sentences that are read at a time",
    ),
    Refusal(
        "--print-step",
        lambda args: _translates_once(args) and args.print_step,
        "is for models that refine a translation in steps; these write it once, from left to right",
    ),
    Refusal(
        "--retain-iter-history",
        lambda args: _translates_once(args) and args.retain_iter_history,
        "is for models that refine a translation in steps; these write it once, from left to right",
    ),
    Refusal(
        "--post-process",
        lambda args: hasattr(args, "output_word_probs") and args.post_process not in JOINED_BY_EVAL_LM,
        "in fairseq-eval-lm joins the pieces of subword_nmt only; leave it out for a model of characters",
    ),
    Refusal(
        "--num-batch-buckets",
        lambda args: getattr(args, "num_batch_buckets", 0) and args.max_tokens is None,
        "fills batches of a few lengths with symbols, and needs --max-tokens",
    ),
    Refusal(
        "--sampling",
        lambda args: getattr(args, "sampling", False) and args.nbest != args.beam,
        "gives as many samples as beams: --nbest and --beam must be the same number",
    ),
)


def refuse_what_cannot_work() -> bool:
    """Makes fairseq raise UsageError for the options in REFUSALS after it has parsed a command line.

    fairseq-generate ignores ``--num-shards``; here it translates the share that the option names.
    """
    from fairseq import options

    @in_place_of(options, "parse_args_and_arch")
    def parse_args_and_arch(inner, parser, *args, suppress_defaults=False, **kwargs):
        parsed = inner(parser, *args, suppress_defaults=suppress_defaults, **kwargs)
        if isinstance(parsed, Namespace) and not suppress_defaults:
            check(parsed)
            if _searches_data(parsed):
                _divide_sentences(parsed)
        return parsed

    return True


def check(args: Namespace) -> None:
    """Raises UsageError for the first option that is refused."""
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise UsageError(f"{refusal.option} {refusal.reason}")


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


def name_components_without_options() -> bool:
    """A component of fairseq without a dataclass, such as --bpe characters, cannot be configured.

    Hydra then prints a list of its search paths and a traceback; here the error is one line.
    """
    from fairseq.dataclass import utils
    from hydra.errors import MissingConfigException

    inner = utils.convert_namespace_to_omegaconf

    @functools.wraps(inner)
    def convert_namespace_to_omegaconf(args):
        try:
            return inner(args)
        except MissingConfigException as error:
            group, _, name = str(error.missing_cfg_file).partition("/")
            known = ", ".join(sorted(error.options or ()))
            raise UsageError(
                f"--{group} {name} has no configuration in fairseq; choose from {known}"
            ) from error

    for module in (utils, *_importers("convert_namespace_to_omegaconf")):
        module.convert_namespace_to_omegaconf = convert_namespace_to_omegaconf
    return True


def _importers(name: str) -> list:
    """Returns the modules of fairseq that hold their own reference to a function."""
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith(("fairseq.", "fairseq_cli.")) and name in vars(module)
    ]


def name_checkpoint_without_averages() -> bool:
    """--ema-seed-model with a checkpoint that was trained without --store-ema ends in a KeyError."""
    from fairseq import checkpoint_utils

    @in_place_of(checkpoint_utils, "load_ema_from_checkpoint")
    def load_ema_from_checkpoint(inner, fpath):
        try:
            return inner(fpath)
        except KeyError as error:
            if error.args != ("ema",):
                raise
            raise UsageError(
                f"checkpoint {fpath} has no averages: it was trained without --store-ema"
            ) from error

    return True
