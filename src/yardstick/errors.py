"""The one exception that a user is meant to see."""

LONGEST = 2000  # characters of a message


class YardstickError(Exception):
    """A fault of the input, the config or the machine: one line that names the thing and what to do.

    The command line prints the message and exits with code 1. Any other exception is a bug of ours and keeps
    its traceback.
    """

    def __str__(self) -> str:
        # names and values come from files: they may hold line breaks, or be as long as the file
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())
        return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
