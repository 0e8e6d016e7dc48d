"""The valid ranges of fairseq's numeric options, and options that do not act; checked at the start.

fairseq checks few of them. A negative learning rate trains away from the data, a NaN corrupts every weight,
an interval of 0 causes a division by zero after the first epoch, and `--max-epoch -1` ends with status 0
before the first update. The project's cells, layers, models and tasks declare and check their own options.
"""

import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from rhhn_fairseq.compat.names import HIGHER_IS_BETTER, OPTIONAL_FIGURES, check_best_metric
from rhhn_fairseq.errors import UsageError

# Each worker is a process beside the training; more than a few per core only fill memory.
WORKERS = max(32, 4 * (os.cpu_count() or 1))

# The words of a message, the condition that a number meets, and the options. NaN meets none.
TABLE = {
    "at least 0": (
        lambda number: 0 <= number < math.inf,
        """
        max_epoch max_update curriculum validate_after_updates save_interval_updates validate_interval_updates
        empty_cache_freq shard_id data_buffer_size num_batch_buckets buffer_size warmup_updates lr_patience
        min_len prefix_size no_repeat_ngram_size context_window iter_decode_max_iter log_dynamics
        clip_norm adam_eps weight_decay fp16_scale_tolerance stop_time_hours coverage_penalty
        beam_size_threshold activation_reg temporal_activation_reg
        """,
    ),
    "at least 1": (
        lambda number: number >= 1,
        """
        log_interval save_interval validate_interval max_valid_steps max_tokens batch_size max_tokens_valid
        batch_size_valid update_freq required_batch_size_multiple required_seq_len_multiple num_shards
        tokens_per_sample max_source_positions max_target_positions distributed_world_size
        checkpoint_shard_count softmax_batch total_num_update force_anneal fp16_init_scale amp_init_scale
        ema_update_freq nbest max_len_b output_chunk
        """,
    ),
    "at least 1 and at most 10000": (lambda number: 1 <= number <= 10_000, "beam"),
    "at least -1": (
        lambda number: number >= -1,
        "keep_interval_updates keep_last_epochs keep_best_checkpoints",
    ),
    "at least 1, or -1": (
        lambda number: number >= 1 or number == -1,
        "patience keep_interval_updates_pattern sampling_topk diverse_beam_groups",
    ),
    "at least 0 and at most 4.29497e+09": (
        lambda number: 0 <= number < 2**32,
        "seed fixed_validation_seed",
    ),
    f"at least 0 and at most {WORKERS}": (lambda number: 0 <= number <= WORKERS, "num_workers"),
    "more than 0": (lambda number: 0 < number < math.inf, "lr temperature"),
    "at least 0, or -1": (lambda number: 0 <= number < math.inf or number == -1, "diversity_rate"),
    "at least 0 and at most 1": (
        lambda number: 0 <= number <= 1,
        "ema_decay dropout attention_dropout activation_dropout",
    ),
    "at least 0 and less than 1": (lambda number: 0 <= number < 1, "adam_betas momentum label_smoothing"),
    "more than 0 and at most 1": (lambda number: 0 < number <= 1, "lr_shrink"),
    "more than 0 and at most 1, or -1": (lambda number: 0 < number <= 1 or number == -1, "sampling_topp"),
    # Lengths to far higher powers, and far longer translations, overflow.
    "at least -10 and at most 10": (lambda number: -10 <= number <= 10, "lenpen"),
    "at least 0 and at most 1000": (lambda number: 0 <= number <= 1000, "max_len_a"),
    "a finite number": (
        lambda number: -math.inf < number < math.inf,
        "unkpen lm_weight diverse_beam_strength",
    ),
}
RANGES = {name: (words, holds) for words, (holds, names) in TABLE.items() for name in names.split()}


def _generates(given: Callable) -> bool:
    """Returns whether the program is fairseq-generate."""
    return given("beam") is not None and given("buffer_size") is None and given("max_update") is None


TASKS_WITHOUT_COMBINING = ("char_lm", "handwriting", "synthetic")

# Messages about options that exclude each other or would not act, with placeholders for their values, and
# the conditions.
CONFLICTS = {
    "--valid-subset {valid_subset} and --combine-valid-subsets exclude each other; leave one of them out": (
        lambda given: given("combine_valid_subsets") and given("valid_subset") != "valid"
    ),
    "--ema-decay, --ema-start-update, --ema-update-freq have no effect without --store-ema": lambda given: (
        given("store_ema") is False
        and (given("ema_decay"), given("ema_start_update"), given("ema_update_freq")) != (0.9999, 0, 1)
    ),
    "--subword-nbest has no effect without --subword-sampling": lambda given: (
        given("max_update") is not None
        and not given("subword_sampling")
        and given("subword_nbest") not in (None, 64)
    ),
    "--attention-size and --attention-normalised go with --attention-score additive only": lambda given: (
        given("attention_score") == "general" and (given("attention_size") or given("attention_normalised"))
    ),
    "--disable-validation gives no figures for --patience, --keep-best-checkpoints and reduce_lr_on_plateau "
    "to compare": lambda given: (
        given("disable_validation")
        and (
            (given("patience") or -1) > 0
            or (given("keep_best_checkpoints") or -1) > 0
            or given("lr_scheduler") == "reduce_lr_on_plateau"
        )
    ),
    "--force-anneal {force_anneal} with polynomial_decay depends on where a training is restarted; use "
    "--total-num-update": lambda given: (
        given("lr_scheduler") == "polynomial_decay" and given("force_anneal") is not None
    ),
    "--combine-valid-subsets goes with translation; name the splits of {task} with --valid-subset": (
        lambda given: given("combine_valid_subsets") and given("task") in TASKS_WITHOUT_COMBINING
    ),
    "--nbest {nbest} is more than --beam {beam}": lambda given: (
        given("beam") is not None and (given("nbest") or 1) > given("beam")
    ),
    "--beam {beam} is no multiple of --diverse-beam-groups {diverse_beam_groups}": lambda given: (
        (given("diverse_beam_groups") or -1) > 0 and given("beam") % given("diverse_beam_groups")
    ),
    "--replace-unk copies words of the source text, which binary data lack: give --dataset-impl raw "
    "or use fairseq-interactive": lambda given: (
        _generates(given) and given("replace_unk") is not None and given("dataset_impl") != "raw"
    ),
    "--constraints stand behind the sentences in the input of fairseq-interactive": lambda given: (
        _generates(given) and given("constraints") is not None
    ),
    "--print-alignment soft is for fairseq-generate without --score-reference and --replace-unk; leave soft "
    "out": lambda given: (
        given("print_alignment") == "soft"
        and (given("score_reference") or (given("replace_unk"), given("buffer_size")) != (None, None))
    ),
    "--score-reference divides by the length alone; leave --length-penalty and --coverage-penalty out": (
        lambda given: (
            given("score_reference")
            and (given("length_penalty") not in (None, "fairseq") or given("coverage_penalty"))
        )
    ),
    "--score-reference scores a data directory, and fairseq-interactive has none": lambda given: (
        given("buffer_size") is not None and given("score_reference")
    ),
    "fairseq-generate runs without torchrun, where every worker would translate everything: --num-shards and "
    "--shard-id divide it": lambda given: (
        _generates(given) and "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    ),
    # fairseq-train has max_update, -interactive buffer_size, -validate neither of the last two.
    "--num-shards divides the sentences of fairseq-generate; torchrun divides those of fairseq-train and "
    "-validate": lambda given: (
        (given("num_shards") or 1) > 1
        and (
            any(given(name) is not None for name in ("max_update", "buffer_size"))
            or all(given(name) is None for name in ("beam", "output_word_probs"))
        )
    ),
}


def check(options: Mapping[str, object]) -> None:
    """Raises UsageError for the first option out of its range, and for options that do not go together.

    Args:
        options: values by name as `--name` or as `section.name`. Lists are checked number by number; None
            is not checked.
    """
    check_ranges(options)
    values = {_plain(name): value for name, value in options.items()}
    for text, conflict in CONFLICTS.items():
        if conflict(values.get):
            raise UsageError(text.format_map(values))


def check_ranges(options: Mapping[str, object]) -> None:
    """Does the first half of ``check``."""
    for name, value in options.items():
        # NaN, which is unequal to itself, is not valid for any option.
        words, holds = RANGES.get(_plain(name), ("a finite number", lambda number: number == number))
        # A string option without a range is a name, and may look like a number.
        for number in () if isinstance(value, str) and _plain(name) not in RANGES else _numbers(value):
            if not holds(number):
                shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
                raise UsageError(f"{name} {shown} is not possible: {words}")
        if _plain(name) == "eval_bleu_args" and value:
            check_ranges({f"{name} {key}": inner for key, inner in json.loads(value).items()})


def _plain(name: str) -> str:
    """Returns the field that an option sets."""
    return re.split(r"[. ]", name)[-1].lstrip("-").replace("-", "_")


def _numbers(value) -> Iterator[float]:
    """Yields the numbers in a value; strings that are no numbers yield none."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, str):
        for word in value.strip("()[] ").split(","):
            try:
                yield float(word)
            except ValueError:
                return


def options_of(cfg: DictConfig) -> dict[str, object]:
    """Returns the options of a complete configuration by `section.name`."""
    sections = OmegaConf.to_container(cfg, resolve=False)
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def check_command_line(namespace: Namespace) -> None:
    """Checks the options of a command line, and makes the best checkpoint's direction that of its figure."""
    given = vars(namespace)
    check({"--" + name.replace("_", "-"): value for name, value in given.items()})
    if "max_update" in given:
        metric = given.get("best_checkpoint_metric")
        optional = [name for name, option in OPTIONAL_FIGURES.items() if given.get(_plain(option))]
        check_best_metric(metric, given.get("task"), given.get("criterion"), optional)
        if metric in HIGHER_IS_BETTER:
            namespace.maximize_best_checkpoint_metric = True


def check_configuration(cfg: DictConfig) -> None:
    """Does under Hydra, where there is no command line, what ``check_command_line`` does."""
    check(options_of(cfg))
    if cfg.common_eval.path is not None:
        return
    metric, criterion = cfg.checkpoint.best_checkpoint_metric, cfg.get("criterion")
    options = OPTIONAL_FIGURES.items()
    parts = (cfg.task, criterion)
    optional = [name for name, option in options if any(getattr(p, _plain(option), None) for p in parts)]
    names = (getattr(part, "_name", None) for part in parts)
    check_best_metric(metric, *names, optional)
    for section in (cfg.checkpoint, cfg.get("lr_scheduler")):
        if metric in HIGHER_IS_BETTER and hasattr(section, "maximize_best_checkpoint_metric"):
            section.maximize_best_checkpoint_metric = True
