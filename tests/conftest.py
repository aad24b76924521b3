"""For all tests."""

import signal

# Whatever starts in the background of a shell script ignores Ctrl-C, and so would all it starts:
# programs of ours that the tests interrupt among them.
signal.signal(signal.SIGINT, signal.default_int_handler)
