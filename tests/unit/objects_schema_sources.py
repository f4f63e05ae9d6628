"""SGLang's source code as an index of classes and what they hold, made with ``ast``: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

_PROPERTIES = {"property", "functools.cached_property", "cached_property"}


class Source:
    """One release's ``sglang`` folder; modules are parsed when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019 - a handful of sources live for the whole test run
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
    def classes(self) -> dict[str, Class]:
        return {node.name: Class(self, node) for node in self.statements if isinstance(node, ast.ClassDef)}

    @cached_property
    def names(self) -> set[str]:
        """Module globals that are assigned or declared here."""
        return {name for node in self.statements for name in _names(node)}

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        """Functions and methods by their bare names."""
        return {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name there)."""
        found: dict[str, tuple[str, str]] = {}
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
            return self.classes[name]
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
        found: list[Class] = []
        todo = [self]
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
        """Name -> how an instance comes to have it, bases included.

        ``stored``; ``declared`` with a value or as a field; ``annotated`` only; ``getter a.b``, a property that only
        returns that attribute; ``computed``, any other property; ``method``. What a base stores in its ``__init__``
        does not count where a subclass has one of its own that does not call it.
        """
        found: dict[str, str] = {}
        initialised = True
        for cls in self.lineage:
            for name, how in _own_attributes(cls.node):
                if how == "initialised":
                    if not initialised:
                        continue
                    how = "stored"
                if name not in found or (how == "stored" and found[name] != "stored"):
                    found[name] = how
            initialised = initialised and not _cuts_off(cls.node)
        return found

    def is_kind_of(self, other: Class) -> bool:
        return other.dotted in {cls.dotted for cls in self.lineage}


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
        leaf for target in targets for leaf in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def _names(node: ast.AST) -> list[str]:
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]


def _cuts_off(node: ast.ClassDef) -> bool:
    """Whether the class has an ``__init__`` that calls no other one."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            calls = [inner.func for inner in ast.walk(statement) if isinstance(inner, ast.Call)]
            return not any(isinstance(call, ast.Attribute) and call.attr == "__init__" for call in calls)
    return False


def _own_attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    record = any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        ast.unparse(base).endswith(("Struct", "NamedTuple")) for base in node.bases
    )
    for statement in _scope(node.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_function(statement)
        elif isinstance(statement, ast.Assign) and _names(statement) == ["__slots__"]:
            # A slot may stay empty: it has to be stored to as well.
            continue
        else:
            valued = record or getattr(statement, "value", None) is not None
            yield from ((name, "declared" if valued else "annotated") for name in _names(statement))


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    decorators = {ast.unparse(d) for d in node.decorator_list}
    if decorators & _PROPERTIES:
        yield node.name, _getter(node) if "property" in decorators else "computed"
    elif not any(d.endswith((".setter", ".deleter")) for d in decorators):
        yield node.name, "method"
    arguments = [*node.args.posonlyargs, *node.args.args]
    if not arguments or "staticmethod" in decorators:
        return
    how = "initialised" if node.name == "__init__" else "stored"
    for inner in ast.walk(node):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and _is_name(target.value, arguments[0].arg):
                yield target.attr, how
        if name := _set_attribute(inner, arguments[0].arg):
            yield name, how


def _set_attribute(node: ast.AST, me: str) -> str:
    """The name in ``object.__setattr__(self, "name", …)``, else nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__":
        match node.args:
            case [ast.Name(id=first), ast.Constant(value=str(name)), _] if first == me:
                return name
    return ""


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _getter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        text = ast.unparse(body[0].value)
        me, _, rest = text.partition(".")
        if me == node.args.args[0].arg and all(part.isidentifier() for part in rest.split(".")):
            return f"getter {rest}"
    return "computed"


def words(module: Module) -> set[str]:
    """Text constants of a module, and the parts of those that are dotted."""
    texts = [n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {part for text in texts if len(text) < 100 for part in [text, *text.split(".")]}


def locals_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Arguments and names that are assigned in the function, inner functions included."""
    arguments = {argument.arg for argument in [*function.args.posonlyargs, *function.args.args]}
    return arguments | {name for node in ast.walk(function) for name in _names(node)}


def captured(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that functions defined within it read."""
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    return {
        name.id
        for node in inner
        if node is not function
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    }
