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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from rhhn_fairseq.compat.names import HIGHER_IS_BETTER, OPTIONAL_FIGURES, check_best_metric
from rhhn_fairseq.errors import UsageError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, and the value `also`, which switches something off.

    `above` and `below` exclude the bound itself.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    also: float | None = None

    def __contains__(self, number: float) -> bool:
        if number == self.also:
            return True
        enough = number > self.low if self.above else number >= self.low
        return enough and (number < self.high if self.below else number <= self.high)

    def __str__(self) -> str:
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'more than' if self.above else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'less than' if self.below else 'at most'} {self.high:g}")
        text = " and ".join(bounds) or "a finite number"
        return text if self.also is None else f"{text}, or {self.also:g}"


FINITE = Range(-math.inf, math.inf, above=True, below=True)
STRENGTH = Range(0, math.inf, below=True)
# Each worker is a process beside the training; more than a few per core only fill memory.
WORKERS = Range(0, max(32, 4 * (os.cpu_count() or 1)))

TABLE = {
    Range(0): """
        max_epoch max_update curriculum validate_after_updates save_interval_updates validate_interval_updates
        empty_cache_freq shard_id data_buffer_size num_batch_buckets buffer_size warmup_updates lr_patience
        min_len prefix_size no_repeat_ngram_size context_window iter_decode_max_iter log_dynamics
    """,
    Range(1): """
        log_interval save_interval validate_interval max_valid_steps max_tokens batch_size max_tokens_valid
        batch_size_valid update_freq required_batch_size_multiple required_seq_len_multiple num_shards
        tokens_per_sample max_source_positions max_target_positions distributed_world_size
        checkpoint_shard_count softmax_batch total_num_update force_anneal fp16_init_scale amp_init_scale
        ema_update_freq nbest max_len_b output_chunk
    """,
    Range(1, 10_000): "beam",
    Range(-1): "keep_interval_updates keep_last_epochs keep_best_checkpoints",
    Range(1, also=-1): "patience keep_interval_updates_pattern sampling_topk diverse_beam_groups",
    Range(0, 2**32 - 1): "seed fixed_validation_seed",
    WORKERS: "num_workers",
    Range(0, math.inf, above=True, below=True): "lr temperature",
    STRENGTH: """
        clip_norm adam_eps weight_decay fp16_scale_tolerance stop_time_hours coverage_penalty
        beam_size_threshold activation_reg temporal_activation_reg
    """,
    Range(0, math.inf, below=True, also=-1): "diversity_rate",
    Range(0, 1): "ema_decay dropout attention_dropout activation_dropout",
    Range(0, 1, below=True): "adam_betas momentum label_smoothing",
    Range(0, 1, above=True): "lr_shrink",
    Range(0, 1, above=True, also=-1): "sampling_topp",
    # Lengths to far higher powers, and far longer translations, overflow.
    Range(-10, 10): "lenpen",
    Range(0, 1000): "max_len_a",
    FINITE: "unkpen lm_weight diverse_beam_strength",
}
RANGES = {name: allowed for allowed, names in TABLE.items() for name in names.split()}

# Messages about options that exclude each other or would not act, with placeholders for their values, and
# the conditions.
CONFLICTS = {
    "--nbest {nbest} is more than --beam {beam} hypotheses": lambda given: (
        (given("nbest") or 1) > (given("beam") or math.inf)
    ),
    "--beam {beam} is no multiple of --diverse-beam-groups {diverse_beam_groups}": lambda given: (
        (given("diverse_beam_groups") or 0) > 0 and (given("beam") or 0) % given("diverse_beam_groups")
    ),
    "--valid-subset {valid_subset} and --combine-valid-subsets exclude each other; leave one of them out": (
        lambda given: given("combine_valid_subsets") and given("valid_subset") != "valid"
    ),
    "--ema-decay, --ema-start-update, --ema-update-freq have no effect without --store-ema": lambda given: (
        given("store_ema") is False
        and (given("ema_decay"), given("ema_start_update"), given("ema_update_freq")) != (0.9999, 0, 1)
    ),
    "--attention-size and --attention-normalised go with --attention-score additive only": lambda given: (
        given("attention_score") == "general" and (given("attention_size") or given("attention_normalised"))
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
    """Raises UsageError for the first option out of its range.

    Args:
        options: values by name as `--name` or as `section.name`. Lists are checked number by number; None
            is not checked.
    """
    for name, value in options.items():
        allowed = RANGES.get(_plain(name))
        if allowed is not None and isinstance(value, list | tuple) and not value:
            raise UsageError(f"{name} has no value; give at least one: {allowed}")
        # A string option without a range is a name, and may look like a number.
        for number in () if isinstance(value, str) and allowed is None else _numbers(value):
            # NaN, which is unequal to itself, is not valid for any option.
            if number != number or (allowed is not None and number not in allowed):
                raise UsageError(f"{name} {_shown(value)} is not possible: {allowed or FINITE}")
        if _plain(name) == "adam_betas" and isinstance(value, str) and len(list(_numbers(value))) != 2:
            raise UsageError(f"{name} {value} is not possible: two numbers such as (0.9, 0.999)")
        if _plain(name) == "eval_bleu_args" and value:
            check({f"{name} {key}": inner for key, inner in json.loads(value).items()})
    values = {_plain(name): value for name, value in options.items()}
    for text, conflict in CONFLICTS.items():
        if conflict(values.get):
            raise UsageError(text.format_map(values))


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


def _shown(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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
        check_best_metric(metric, given.get("criterion"), optional)
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
    check_best_metric(metric, getattr(criterion, "_name", None), optional)
    for section in (cfg.checkpoint, cfg.get("lr_scheduler")):
        if metric in HIGHER_IS_BETTER and hasattr(section, "maximize_best_checkpoint_metric"):
            section.maximize_best_checkpoint_metric = True
