"""Configuration files of fairseq-hydra-train: where ``--config-name`` is looked up, and sweeps."""

import functools
import logging
import os
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rhhn_fairseq.errors import UsageError, nearest

logger = logging.getLogger("rhhn_fairseq.compat")

CONFIGS = Path(__file__).parents[1] / "configs"


def look_in_the_package() -> bool:
    """``fairseq-hydra-train`` searches fairseq's own directory and --config-dir for a configuration.

    Here, without --config-dir, it then searches ``configs`` of this package. fairseq falls back to its
    defaults for a name that is in none of them, even a mistyped one, and would train without the user's
    file; this is refused.
    The check has no effect if this package is loaded only through --user-dir, because Hydra is already
    running then.
    """
    import fairseq
    from fairseq.dataclass import initialize
    from hydra._internal.utils import get_args_parser
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Configs(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            if get_args_parser().parse_known_args()[0].config_dir is None:
                search_path.append("rhhn_fairseq", f"file://{CONFIGS}")

    Plugins.instance().register(Configs)
    inner = initialize.hydra_init

    @functools.wraps(inner)
    def hydra_init(cfg_name="config"):
        args, _ = get_args_parser().parse_known_args()
        # Hydra resolves a relative --config-path from the program's own folder.
        own = Path(fairseq.__file__).parents[1] / "fairseq_cli" / (args.config_path or "../fairseq/config")
        places = [own, Path(args.config_dir or CONFIGS)]
        file = f"{cfg_name.removesuffix('.yaml')}.yaml"
        if args.config_name == cfg_name and not any((place / file).is_file() for place in places):
            known = {path.stem for place in places for path in place.glob("*.yaml")}
            raise UsageError(f"--config-name {cfg_name}: there is no {file}: {nearest(cfg_name, known)}")
        inner(cfg_name)

    for module in (initialize, sys.modules.get("fairseq_cli.hydra_train")):
        if module is not None:
            module.hydra_init = hydra_init
    return True


def separate_jobs(cfg: DictConfig) -> None:
    """Gives every job of a ``--multirun`` the relative paths of its output in Hydra's directory of the job.

    A second job would otherwise resume from the checkpoints of the first and train nothing. Where an absolute
    path has this effect, the second job is refused. Calling it again changes nothing: where the package is
    installed, both fairseq-hydra-train and the training that it starts call this.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return
    save_dir = OmegaConf.to_container(cfg.checkpoint, resolve=False)["save_dir"]
    own = not os.path.isabs(save_dir) or Path(save_dir).is_relative_to(hydra.runtime.output_dir)
    if hydra.job.num > 0 and not own and not differs_by_job("checkpoint.save_dir", save_dir):
        raise UsageError(
            f"checkpoint.save_dir={save_dir}: job {hydra.job.num} of the sweep would resume from the "
            f"checkpoints of job 0; give a relative path, or {os.path.join(save_dir, '${hydra:job.num}')}"
        )
    for key in ("checkpoint.save_dir", "common.tensorboard_logdir", "common.log_file"):
        path = OmegaConf.select(cfg, key)
        if path:
            # An absolute path stays as it is.
            OmegaConf.update(cfg, key, os.path.join(hydra.runtime.output_dir, path))
    if not os.path.isabs(save_dir):
        logger.info("job %s of the sweep: checkpoints in %s", hydra.job.num, cfg.checkpoint.save_dir)


def differs_by_job(key: str, value: str) -> bool:
    """Returns whether an option, here its unresolved value, may differ between the jobs of a sweep."""
    given = [argument.split("=", 1)[1] for argument in sys.argv if argument.lstrip("+").startswith(f"{key}=")]
    # A sweep's list of values is not equal to any of them.
    return "${" in value or any(text.strip("'\"") != value for text in given[-1:])
