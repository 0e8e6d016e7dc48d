"""Adapts fairseq to current Python and PyTorch: all adaptations, in the order in which they are applied.

fairseq is no longer developed, and its installed files are never edited. Instead a few of its
functions are wrapped when the plugin is loaded. Each adaptation is one function in
`rhhn_fairseq/compat/`. Its docstring says what breaks without it, it first checks whether the
defect is present (some wrappers check at each call, because it shows only then), and a test fails
without it. The applied adaptations are logged in one debug line as `rhhn_fairseq.compat`.
"""

import importlib
import importlib.metadata
import logging
import re

from rhhn_fairseq.compat import (
    alignments,
    averages,
    checkpoints,
    command_line,
    datasets,
    divergence,
    hydra_configs,
    loading,
    logs,
    memory,
    mentions,
    mixed_precision,
    one_line,
    quiet,
    ranges,
    recipes,
    restarts,
    searches,
    start,
    stopping,
    torchrun,
    user_dir,
)
from rhhn_fairseq.compat.expressions import configuration_is_data
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import end_with_failing_output

logger = logging.getLogger("rhhn_fairseq.compat")

FAIRSEQ = "fairseq-fixed==0.12.3.1"
OLDEST_FAIRSEQ = (0, 12, 3)

ADAPTATIONS = (
    end_with_failing_output,
    # Before the others log anything.
    quiet.keep_details_off_the_screen,
    checkpoints.allow_namespace,
    checkpoints.load_weights_only,
    checkpoints.read,
    checkpoints.save,
    start.run_a_program,
    start.start_a_training,
    start.make_an_update,
    restarts.resume,
    stopping.stop_within_a_validation,
    checkpoints.leave_no_empty_directory,
    checkpoints.keep_the_best_of_negative_figures,
    restarts.copy_completely,
    restarts.batch_alike_in_every_start,
    restarts.save_plateaus,
    configuration_is_data,
    torchrun.join_late_under_hydra,
    torchrun.wrap_cpu_modules,
    torchrun.broadcast_objects,
    torchrun.gather_objects_on_cpu,
    torchrun.validate_on_uneven_shares,
    mixed_precision.unscale_once,
    mixed_precision.keep_master_weights,
    averages.average_floating_point_only,
    averages.count_updates_across_restarts,
    loading.restore_numpy_names,
    loading.keep_the_last_batch,
    loading.load_masked_dictionaries,
    loading.keep_lines_whole,
    loading.stop_reading_at_the_end,
    loading.end_data_workers_with_training,
    alignments.replace_unknown_by_alignment,
    user_dir.accept_same_directory,
    one_line.end_hydra_in_one_line,
    memory.keep_memory_of_programs,
    hydra_configs.look_in_the_package,
    recipes.fill_in_configuration,
    searches.leave_out_symbols_without_a_score,
    divergence.end_divergence_in_one_line,
    datasets.check_data_files,
    checkpoints.bound_the_model,
    command_line.read_command_line,
    ranges.check_configuration,
    logs.restore_root_logger,
    logs.repair_inf_score_record,
    logs.silence_known_warnings,
    logs.leave_a_full_log_file,
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
