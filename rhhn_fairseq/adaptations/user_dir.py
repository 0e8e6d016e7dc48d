"""`--user-dir` when the package has been imported already."""

import functools
import logging
import os
import sys

from rhhn_fairseq.adaptations import mentions
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

PACKAGE = __name__.split(".")[0]


def accept_same_directory() -> bool:
    """fairseq compares the two paths letter by letter.

    A symbolic link, or the `site-packages/fairseq/../rhhn_fairseq` it makes of `--user-dir
    rhhn_fairseq` when the package is installed, is then "not globally unique". Here the places
    that the paths lead to are compared. Another copy of the package cannot be loaded beside the
    first, so that ends in one line with both paths, and a directory that does not exist in one line
    as well.
    """
    from fairseq import utils

    if mentions(utils.import_user_module, "realpath"):
        return False
    inner = utils.import_user_module

    @functools.wraps(inner)
    def import_user_module(args):
        user_dir = getattr(args, "user_dir", None)
        if user_dir is None:
            return
        path = locate(user_dir, beside=os.path.dirname(utils.__file__))
        if os.path.basename(path) != PACKAGE:
            inner(args)
            return
        # The plugin is loaded, or this function would not have been wrapped: nothing to import.
        imported = [os.path.realpath(place) for place in sys.modules[PACKAGE].__path__]
        if path not in imported:
            raise UsageError(
                f"--user-dir {path} is another copy of {PACKAGE} than the one already imported "
                f"from {imported[0]}: name that one, or run Python where it does not find it first"
            )
        logger.debug("--user-dir %s is already imported", path)

    utils.import_user_module = import_user_module
    return True


def locate(user_dir: str, beside: str) -> str:
    """The real path of a user directory, looked for where fairseq looks: here, in and beside fairseq.

    The name of this package stands for the package that is imported, wherever it is installed.

    Raises UsageError if there is no such directory.
    """
    places = [os.path.abspath(user_dir), *(os.path.join(beside, up, user_dir) for up in ("", ".."))]
    for place in places:
        if os.path.exists(place):
            return os.path.realpath(place)
    if user_dir == PACKAGE:
        return os.path.realpath(sys.modules[PACKAGE].__path__[0])
    raise UsageError(f"--user-dir {user_dir}: there is no directory {places[0]}")
