"""Stand-in submodules: importable, empty, and answering any attribute with what their package chooses."""

# The finder and loader methods have the parameters that importlib gives them.
# ruff: noqa: ARG002

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def is_dunder(name: str) -> bool:
    """Whether Python itself asks for the attribute; a stand-in must not answer those (`__path__`, `__file__`...)."""
    return name.startswith("__")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of one package that it was given, by full name, and no others."""

    def __init__(self, modules: Mapping[str, Callable[[str], Any]]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        has_children = any(name.startswith(fullname + ".") for name in self._modules)
        return importlib.machinery.ModuleSpec(fullname, self, origin="sgdiag lab", is_package=has_children)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        answer = self._modules[module.__name__]

        def attribute(name: str) -> Any:
            if is_dunder(name):
                raise AttributeError(name)
            # `from package import submodule` asks here first.
            child = f"{module.__name__}.{name}"
            return importlib.import_module(child) if child in self._modules else answer(name)

        # PEP 562: a module-level __getattr__ answers for names the module does not hold.
        module.__dict__["__getattr__"] = attribute


def install(modules: Mapping[str, Callable[[str], Any]]) -> None:
    """Make each full module name importable; its callable gives the value of an attribute by name."""
    sys.meta_path.append(_StandInFinder(modules))
