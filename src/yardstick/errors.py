"""The one exception that a user is meant to see."""


class YardstickError(Exception):
    """A fault of the input, the config or the machine: one line that names the thing and what to do.

    The command line prints the message and exits with code 1. Any other exception is a bug of ours and keeps
    its traceback.
    """
