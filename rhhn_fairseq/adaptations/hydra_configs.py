"""The package's own configurations, which ``--config-name`` names in any directory."""

import os
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"


def look_in_the_package() -> bool:
    """``fairseq-hydra-train`` looks for a configuration in fairseq's own directory and in --config-dir.

    Without --config-dir it looks in ``rhhn_fairseq/configs`` as well, after its own. Hydra merges
    directories, and those in there have files of the same names, so it is given the one that holds the
    configuration. Other programs that use Hydra are left alone.
    """
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Configs(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            # fairseq's other programs have their defaults from Hydra, but options of their own.
            if "hydra" not in os.path.basename(sys.argv[0]) or not reads_fairseqs_own(search_path):
                return
            folder = folder_of_arguments()
            if folder is not None:
                search_path.append("rhhn_fairseq", f"file://{folder}")

    Plugins.instance().register(Configs)
    return True


def reads_fairseqs_own(search_path) -> bool:
    """Whether the program's own directory of configurations is fairseq's."""
    main = [item.path for item in search_path.get_path() if item.provider == "main"]
    # A directory, or a package where the program was started with python -m.
    return any(path.replace(".", "/").endswith("fairseq/config") for path in main)


def own_names() -> dict[str, Path]:
    """The package's configurations by name, with the directory of each."""
    return {path.stem: path.parent for path in CONFIGS.glob("*/*.yaml")}


def folder_of_arguments() -> Path | None:
    """The package's directory with the configuration that the command line of fairseq-hydra-train names.

    None where the command line names no configuration or says itself where it is, and where fairseq has it.
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
