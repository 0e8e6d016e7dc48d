"""Lets ``--config-name`` find the package's own configurations from any directory."""

import os
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"


def look_in_the_package() -> bool:
    """``fairseq-hydra-train`` only searches fairseq's own directory and --config-dir for a configuration.

    Here, without --config-dir, it then searches ``rhhn_fairseq/configs``. Hydra merges directories, and
    the subdirectories there have files of the same names, so only the one that holds the configuration
    is added. Other programs that use Hydra are not affected.
    """
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Configs(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            if not is_hydras_program() or not reads_fairseqs_own(search_path):
                return
            folder = folder_of_arguments()
            if folder is not None:
                search_path.append("rhhn_fairseq", f"file://{folder}")

    Plugins.instance().register(Configs)
    return True


def is_hydras_program() -> bool:
    """Whether Hydra reads the command line. fairseq's other programs only take defaults from it."""
    return "hydra" in os.path.basename(sys.argv[0])


def reads_fairseqs_own(search_path) -> bool:
    """Returns whether the program's own directory of configurations is fairseq's."""
    main = [item.path for item in search_path.get_path() if item.provider == "main"]
    # A directory, or a package if the program was started with python -m.
    return any(path.replace(".", "/").endswith("fairseq/config") for path in main)


def own_names() -> dict[str, Path]:
    """Returns the directory of each of the package's configurations, by name."""
    return {path.stem: path.parent for path in CONFIGS.glob("*/*.yaml")}


def folder_of_arguments() -> Path | None:
    """Returns the package's directory with the configuration named on fairseq-hydra-train's command line.

    Returns None if the command line names no configuration, if it says where to look, or if fairseq has it.
    """
    import fairseq
    from hydra._internal.utils import get_args

    arguments = get_args()
    name = arguments.config_name
    if name is None or arguments.config_dir is not None or arguments.config_path is not None:
        return None
    name = name.removesuffix(".yaml")
    if (Path(fairseq.__file__).parent / "config" / f"{name}.yaml").is_file():
        return None
    return own_names().get(name)
