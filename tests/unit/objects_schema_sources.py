"""SGLang's source code as an index of classes and what they hold, made with ``ast``: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

_PROPERTIES = {"property", "functools.cached_property", "cached_property"}


class Source:
    """One release's ``sglang`` folder; modules are parsed when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @lru_cache(maxsize=None)  # noqa: B019 - a handful of sources live for the whole test run
    def module(self, dotted: str) -> Module | None:
        """``sglang.srt.managers.scheduler``; None where this release has no such module."""
        parts = dotted.split(".")
        if parts[0] != "sglang":
            return None
        base = self.folder.joinpath(*parts[1:])
        for path in (base.with_suffix(".py") if len(parts) > 1 else base / "__init__.py", base / "__init__.py"):
            if path.is_file():
                return Module(self, dotted, path)
        return None

    def find(self, dotted: str) -> Class | None:
        """The class of that dotted name, also where the module only imports it."""
        module, _, name = dotted.rpartition(".")
        found = self.module(module)
        return found.lookup(name) if found else None


class Module:
    def __init__(self, source: Source, dotted: str, path: Path) -> None:
        self.source, self.dotted, self.path = source, dotted, path
        self.package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """Those of the module's own scope, also under ``if`` and ``try``."""
        return list(_scope(self.tree.body))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.statements if isinstance(node, ast.ClassDef)}

    @cached_property
    def names(self) -> set[str]:
        """Module globals that are assigned or declared here."""
        return {name for node in self.statements for name in _names(node)}

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        return {n.name: n for n in self.statements if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name there)."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    stem = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    base = ".".join([*stem, base] if base else stem)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, (base, alias.name))
        return found

    def lookup(self, name: str, depth: int = 5) -> Class | None:
        if name in self.classes:
            return Class(self, self.classes[name])
        if name in self.imports and depth:
            module = self.source.module(self.imports[name][0])
            return module.lookup(self.imports[name][1], depth - 1) if module else None
        return None


class Class:
    def __init__(self, module: Module, node: ast.ClassDef) -> None:
        self.module, self.node = module, node

    @property
    def dotted(self) -> str:
        return f"{self.module.dotted}.{self.node.name}"

    @cached_property
    def lineage(self) -> list[Class]:
        """The class and its bases as far as they are SGLang's own."""
        found, todo = [], [self]
        while todo:
            here = todo.pop(0)
            if here.dotted in {c.dotted for c in found}:
                continue
            found.append(here)
            for base in here.node.bases:
                name = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(name, ast.Name) and (parent := here.module.lookup(name.id)):
                    todo.append(parent)
        return found

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Name -> how an instance comes to have it, bases included: ``stored``, ``declared``, ``getter a.b`` (a
        property that only returns that attribute), ``computed`` (any other property) or ``method``."""
        found: dict[str, str] = {}
        for cls in self.lineage:
            for name, how in _own_attributes(cls.node):
                if name not in found or (how == "stored" and found[name] != "stored"):
                    found[name] = how
        return found


def _scope(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _scope(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _scope(handler.body)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars:
        targets = [node.optional_vars]
    else:
        return []
    return [
        leaf
        for target in targets
        for leaf in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def _names(node: ast.AST) -> list[str]:
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]


def _own_attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in _scope(node.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_function(statement)
        elif isinstance(statement, ast.Assign) and _names(statement) == ["__slots__"]:
            yield from ((name, "stored") for name in _strings(statement.value))
        else:
            yield from ((name, "declared") for name in _names(statement))


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    decorators = {ast.unparse(d) for d in node.decorator_list}
    if decorators & _PROPERTIES:
        yield node.name, _getter(node) if "property" in decorators else "computed"
    elif not any(d.endswith((".setter", ".deleter")) for d in decorators):
        yield node.name, "method"
    arguments = [*node.args.posonlyargs, *node.args.args]
    if arguments and "staticmethod" not in decorators:
        me = arguments[0].arg
        for inner in ast.walk(node):
            for target in _targets(inner):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == me:
                    yield target.attr, "stored"


def _getter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        text = ast.unparse(body[0].value)
        me, _, rest = text.partition(".")
        if me == node.args.args[0].arg and all(part.isidentifier() for part in rest.split(".")):
            return f"getter {rest}"
    return "computed"


def _strings(node: ast.expr) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
