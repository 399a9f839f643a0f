"""Read a pickle that holds only what a checkpoint holds: classes of this package, numpy arrays, plain values.

A pickle names functions to be called. Here a name is followed only to a class of ``bidirl``, to what numpy
rebuilds its arrays with, or to one of a few plain types; anything else is refused before it is called.
"""

import builtins
import importlib
import pickle
from pathlib import Path
from typing import Any

__all__ = ["Refused", "load"]

PLAIN = {
    "array": {"array", "_array_reconstructor"},
    "builtins": {"set", "frozenset", "complex", "slice", "range", "bytearray", "object"},
    "collections": {"deque", "OrderedDict", "Counter", "defaultdict"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "copyreg": {"_reconstructor"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
}
"""Names outside this package that the pickle of a checkpoint may have, by module."""


class Refused(Exception):
    """The file is missing, damaged, or holds what no checkpoint has; the text says which."""


def load(path: Path) -> Any:
    """Return what a pickle holds.

    Raises:
        Refused: it cannot be read, or names something that a checkpoint does not need.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Refused:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise Refused(f"cannot be read ({type(error).__name__})") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _attribute
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module.partition(".")[0] == "bidirl":
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise Refused(f"names {module}.{name}, which no checkpoint of this release has")


def _attribute(owner: object, name: str) -> Any:
    """Return a method of an object of this package: how a bound method is rebuilt."""
    if type(owner).__module__.partition(".")[0] != "bidirl" or name.startswith("__"):
        raise Refused(f"asks for {name} of a {type(owner).__name__}: no checkpoint does")
    return builtins.getattr(owner, name)
