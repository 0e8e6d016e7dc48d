"""Handles `--user-dir` if the package has already been imported."""

import logging
import os
import sys

from rhhn_fairseq.compat import in_place_of, mentions
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

PACKAGE = __name__.split(".")[0]


def accept_same_directory() -> bool:
    """fairseq compares the two paths as strings.

    A symbolic link, or the `site-packages/fairseq/../rhhn_fairseq` that it makes of `--user-dir
    rhhn_fairseq` if the package is installed, is then "not globally unique". Here the resolved paths
    are compared. Another copy of the package cannot be loaded beside the first, so that ends in a
    one-line error with both paths. A directory that does not exist ends in a one-line error too.
    """
    from fairseq import utils

    if mentions(utils.import_user_module, "realpath"):
        return False

    @in_place_of(utils, "import_user_module")
    def import_user_module(inner, args):
        user_dir = getattr(args, "user_dir", None)
        if user_dir is None:
            return
        path = locate(user_dir, beside=os.path.dirname(utils.__file__))
        if os.path.basename(path) != PACKAGE:
            inner(args)
            return
        # The plugin is already loaded, since this function is wrapped: there is nothing to import.
        imported = [os.path.realpath(place) for place in sys.modules[PACKAGE].__path__]
        if path not in imported:
            raise UsageError(
                f"--user-dir {path} is another copy of {PACKAGE} than the one already imported "
                f"from {imported[0]}: name that one, or run Python where it does not find it first"
            )
        logger.debug("--user-dir %s is already imported", path)

    return True


def locate(user_dir: str, beside: str) -> str:
    """Returns the real path of a user directory, searched as fairseq does: here, in and beside fairseq.

    The name of this package stands for the imported package, wherever it is installed.

    Raises UsageError if there is no such directory.
    """
    places = [os.path.abspath(user_dir), *(os.path.join(beside, up, user_dir) for up in ("", ".."))]
    for place in places:
        if os.path.isdir(place):
            return os.path.realpath(place)
    if user_dir == PACKAGE:
        return os.path.realpath(sys.modules[PACKAGE].__path__[0])
    raise UsageError(f"--user-dir {user_dir}: there is no directory {places[0]}")
