"""The one exception for what a user can get wrong."""


class InputError(ValueError):
    """Bad input: the message says what was given, what was expected and what to do.

    The command lines print the message without a traceback and exit with code 2. Everything else that is raised is a
    fault of ours and keeps its traceback.
    """
