"""Spare the workers of tests what they import of PyTorch and Keras and do not use.

The first optimizer imports ``torch._dynamo``, only to tell the compiler what not to compile, and
PyTorch itself ``torch._meta_registrations``, for tensors without data. That is more than half of
the processor time of a worker's start, and tests start hundreds of workers. Here the first is a
module that answers those two questions; whoever wants more of it gets the real ones of both. Keras
imports scikit-learn for classes that are like its own. This folder is in the PYTHONPATH of workers,
so Python runs this file when it starts.
"""

import gc
import importlib
import importlib.abc
import importlib.util
import sys
import types

COMPILER = "torch._dynamo"
META = "torch._meta_registrations"


class Later(types.ModuleType):
    """Stands in for a module until something else of it is wanted."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        import_real()
        return getattr(importlib.import_module(self.__name__), name)


def import_real():
    """Import the real modules in place of those that stand in for them."""
    for module in (META, COMPILER):
        if isinstance(sys.modules.get(module), Later):
            del sys.modules[module]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not INSTEAD]
    importlib.import_module(META)
    importlib.import_module(COMPILER)


class Imported(importlib.abc.Loader):
    """Returns a module that was imported already."""

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        pass


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports nothing for ``torch._meta_registrations``, but for what generators need of it."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{COMPILER}."):
            import_real()
            importlib.import_module(name)
            return importlib.util.spec_from_loader(name, Imported())
        return importlib.util.spec_from_loader(name, self) if name == META else None

    def create_module(self, spec):
        return Later(spec.name)

    def exec_module(self, module):
        from torch import _C

        if hasattr(_C, "_set_generator_metaclass"):
            from torch._opaque_base import OpaqueBaseMeta

            _C._set_generator_metaclass(OpaqueBaseMeta)


def graph_break(_message=""):
    """Do nothing: nothing is compiled."""


def disable(fn=None, *_, **__):
    """Return the function as it is: nothing is compiled."""
    return fn


INSTEAD = Instead()
WRAPPERS = types.ModuleType("keras.src.wrappers.sklearn_wrapper")
vars(WRAPPERS).update(SKLearnClassifier=None, SKLearnRegressor=None, SKLearnTransformer=None)
sys.modules[WRAPPERS.__name__] = WRAPPERS
if "torch" not in sys.modules:
    sys.meta_path.insert(0, INSTEAD)
    sys.modules[COMPILER] = Later(COMPILER)
    vars(sys.modules[COMPILER]).update(graph_break=graph_break, disable=disable, __path__=[])
    # Imports make a million objects and no garbage.
    gc.set_threshold(50_000, 20, 100)
