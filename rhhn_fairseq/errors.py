"""The exception that is meant for the user."""


class UsageError(ValueError):
    """A value, file or combination that cannot work.

    Its message is one line that names the file or option, the value, and what would be valid. The
    command-line programs print that line and exit with status 1, without a traceback.
    """
