"""Spare the workers of tests the import of PyTorch's compiler.

The first optimizer imports ``torch._dynamo``, only to tell the compiler what not to compile. That
is two fifths of the processor time of a worker's start, and tests start hundreds of workers. Here
it is a module that answers those two questions; whoever wants more of it gets the real one. This
folder is in the PYTHONPATH of workers, so Python runs this file when it starts.
"""

import importlib
import sys
import types

NAME = "torch._dynamo"


class Later(types.ModuleType):
    """Stands in for ``torch._dynamo`` until something else of it is wanted."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def graph_break(_message=""):
    """Do nothing: nothing is compiled."""


def disable(fn=None, *_, **__):
    """Return the function as it is: nothing is compiled."""
    return fn


sys.modules[NAME] = Later(NAME)
vars(sys.modules[NAME]).update(graph_break=graph_break, disable=disable, __path__=[])
