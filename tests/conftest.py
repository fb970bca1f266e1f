"""What paceline logs is on standard error, as without pytest, which would keep it from the forks of a test.

A shell that starts the suite in the background has it ignore SIGINT; tests, and what they start, hear it all the same.
"""

import logging
import signal


class LastResort(logging.Handler):
    """Does what logging does by itself while nobody has given paceline's logger a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None and logging.getLogger("paceline").handlers == [self]:
            logging.lastResort.handle(record)


logging.getLogger("paceline").addHandler(LastResort(logging.WARNING))
signal.signal(signal.SIGINT, signal.default_int_handler)
