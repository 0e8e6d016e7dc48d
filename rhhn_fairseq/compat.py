"""Adapts fairseq to current Python and PyTorch: all adaptations, in the order in which they are applied.

fairseq is no longer developed, and its installed files are never edited. Instead a few of its
functions are wrapped when the plugin is loaded. Each adaptation is one function in
`rhhn_fairseq/adaptations/`. Its docstring says what breaks without it, it first checks whether the
defect is present (some wrappers check at each call, because it shows only then), and a test fails
without it. The applied adaptations are logged in one debug line as `rhhn_fairseq.compat`.
"""

import importlib
import importlib.metadata
import logging
import re

from rhhn_fairseq.adaptations import (
    alignments,
    averages,
    checkpoints,
    datasets,
    divergence,
    full_help,
    hydra_configs,
    loading,
    logs,
    memory,
    mentions,
    mixed_precision,
    names,
    one_line,
    quiet,
    ranges,
    recipes,
    refusals,
    restarts,
    saving,
    searches,
    starting,
    stopping,
    stored_task,
    torchrun,
    user_dir,
)
from rhhn_fairseq.adaptations.expressions import configuration_is_data
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.output import end_with_failing_output

logger = logging.getLogger("rhhn_fairseq.compat")

FAIRSEQ = "fairseq-fixed==0.12.3.1"
OLDEST_FAIRSEQ = (0, 12, 3)

ADAPTATIONS = (
    end_with_failing_output,
    # Before the others log anything.
    quiet.keep_details_off_the_screen,
    checkpoints.allow_namespace,
    checkpoints.load_weights_only,
    checkpoints.name_missing_file,
    starting.start_from_a_good_checkpoint,
    starting.train_alone,
    stopping.stop_with_a_checkpoint,
    checkpoints.require_named_checkpoint,
    checkpoints.name_mismatch,
    checkpoints.gather_before_saving,
    checkpoints.leave_no_empty_directory,
    checkpoints.keep_the_best_of_negative_figures,
    saving.leave_no_cut_checkpoint,
    saving.leave_no_dump_of_a_mistake,
    restarts.copy_completely,
    restarts.batch_alike_in_every_start,
    restarts.check_direction_of_every_checkpoint,
    restarts.count_batches_of_all_workers,
    restarts.continue_patience,
    restarts.continue_clock,
    restarts.continue_without_optimizer,
    # After continue_without_optimizer, which loads the schedule's state.
    restarts.continue_plateaus,
    configuration_is_data,
    torchrun.honour_environment,
    torchrun.keep_off_gpu,
    torchrun.train_bf16_without_tpu,
    torchrun.join_late_under_hydra,
    torchrun.wrap_cpu_modules,
    torchrun.broadcast_objects,
    torchrun.gather_objects_on_cpu,
    torchrun.validate_on_uneven_shares,
    mixed_precision.unscale_once,
    mixed_precision.keep_master_weights,
    saving.save_python_numbers,
    averages.average_floating_point_only,
    averages.begin_with_the_checkpoint,
    averages.count_updates_across_restarts,
    loading.restore_numpy_names,
    loading.keep_the_last_batch,
    loading.stop_reading_at_the_end,
    alignments.replace_unknown_by_alignment,
    user_dir.accept_same_directory,
    one_line.end_hydra_in_one_line,
    one_line.end_fp16_on_cpu_in_one_line,
    memory.keep_memory_of_programs,
    recipes.fill_in_command_line,
    hydra_configs.look_in_the_package,
    recipes.fill_in_configuration,
    stored_task.take_task_from_checkpoint,
    refusals.refuse_what_cannot_work,
    refusals.name_components_without_options,
    refusals.name_checkpoint_without_averages,
    searches.number_diverse_groups_by_batch,
    searches.leave_out_symbols_without_a_score,
    divergence.end_divergence_in_one_line,
    datasets.check_data_files,
    checkpoints.bound_the_model,
    restarts.end_where_complete,
    names.name_the_nearest,
    full_help.list_all_options,
    # Options are checked last, after the others have completed the command line.
    ranges.check_options,
    logs.restore_root_logger,
    logs.repair_inf_score_record,
    logs.silence_known_warnings,
    quiet.sum_up_the_start,
)

_applied: set[str] = set()


def apply() -> None:
    """Applies every adaptation that is needed and not yet applied. Calling it again changes nothing.

    Raises UsageError if fairseq is missing or too old.
    """
    one_line.install_excepthook()
    require_fairseq()
    outcomes = []
    for adapt in ADAPTATIONS:
        if adapt.__name__ not in _applied:
            outcomes.append(f"{adapt.__name__} ({'done' if adapt() else 'not needed'})")
            _applied.add(adapt.__name__)
    if outcomes:
        logger.debug("adaptations of fairseq: %s", ", ".join(outcomes))


def require_fairseq() -> None:
    """Raises UsageError, in one line that says what to install, unless fairseq is recent enough.

    fairseq 0.12.2, the last release under that name, cannot be imported on Python 3.11 (ValueError
    for a mutable default in a dataclass) and does not save a task's state in checkpoints.
    """
    try:
        fairseq = importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise UsageError(f"rhhn_fairseq needs {FAIRSEQ}: pip install {FAIRSEQ}") from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise _too_old(_installed_version()) from error
    version = str(getattr(fairseq, "__version__", "of unknown version"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_FAIRSEQ:
        raise _too_old(version)
    save_checkpoint = importlib.import_module("fairseq.checkpoint_utils").save_checkpoint
    if not mentions(save_checkpoint, "get_checkpoint_dict"):
        raise _too_old(version)


def _too_old(version: str) -> UsageError:
    return UsageError(
        f"rhhn_fairseq needs {FAIRSEQ} and found fairseq {version}: "
        f"pip uninstall fairseq, then pip install {FAIRSEQ}"
    )


def _installed_version() -> str:
    for distribution in ("fairseq", "fairseq-fixed"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
