"""Importing a framework's arithmetic without what its siblings need.

A framework's loss is a few lines of torch or JAX inside a package that also imports engines, clusters and
services. :func:`absent` puts a hollow module in the place of each named top-level package **that is not installed**;
the framework's own files are imported as they are, under their own names, and only they compute anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _HollowType(type):
    """A class that can be subclassed, called, subscripted, combined with | and asked for anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return hollow(f"{cls.__name__}.{name}")

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __lt__(cls, _: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __iter__(cls) -> Any:
        return iter(())


def hollow(name: str) -> Any:
    def new(cls: Any, *args: Any, **_: Any) -> Any:
        # As a decorator it hands back what it decorates.
        if cls.__dict__.get("_hollow") and len(args) == 1 and (isinstance(args[0], type) or callable(args[0])):
            return args[0]
        return object.__new__(cls)

    body = {
        "_hollow": True,
        "__new__": new,
        "__init__": lambda self, *_, **__: None,
        "__getattr__": lambda self, attribute: hollow(f"{name}().{attribute}"),
        "__call__": lambda self, *args, **__: args[0] if len(args) == 1 else hollow(f"{name}()()"),
        "__init_subclass__": classmethod(lambda cls, **_: None),
        "__enter__": lambda self: self,
        "__exit__": lambda self, *_: None,
        "__iter__": lambda self: iter(()),
        "__bool__": lambda self: False,
    }
    return _HollowType(name, (), body)


class _HollowModule(ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "9999.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return hollow(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname in self.packages or fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def absent(packages: Iterable[str]) -> list[str]:
    """Hollow modules for those of ``packages`` that are not installed; returns their names."""
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder(frozenset(missing)))
    return missing


class _Double:
    """A module of arrays whose float32 is float64."""

    def __init__(self, module: Any, float64: Any) -> None:
        self._module, self.float32 = module, float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def double(*modules: ModuleType) -> Iterator[None]:
    """Frameworks that compute in float32 whatever they are given, in double precision.

    In ``modules`` the names ``torch`` and ``jnp`` stand for modules whose ``float32`` is float64, and
    ``torch.Tensor.float`` leaves doubles alone: the formulas are theirs, only the precision is not.
    """
    import torch

    saved: list[tuple[Any, str, Any]] = [(torch.Tensor, "float", torch.Tensor.float)]
    for module in modules:
        for name in ("torch", "jnp"):
            inner = getattr(module, name, None)
            if inner is not None:
                saved.append((module, name, inner))
                setattr(module, name, _Double(inner, inner.float64))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        for owner, name, inner in saved:
            setattr(owner, name, inner)
