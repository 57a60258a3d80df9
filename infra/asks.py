"""Find the functions of Dynamo that ask something of a live object or of the process.

The table of them is ``s3cache/features/recall/asks.txt``. This command computes it again from the
sources of a release, without importing it; new rows have ``?`` as their answer:

    .venv/bin/python -m infra.asks 2.13.0=.venv/lib/python3.11/site-packages/torch
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "s3cache/features/recall/asks.txt"
RELEASES = ("2.13.0", "2.15.0")
#: How recall has the answers to a function's questions.
KINDS = {
    "source": "the value has its own source, and is read again",
    "guard": "a guard says so, and is checked again",
    "content": "it is part of the text of an object's content",
    "key": "it is part of the frame's key",
    "answer": "the same question is asked again",
    "fixed": "the answer depends on its arguments and on torch only",
    "aside": "the answer does not change Dynamo's result",
    "refused": "the frame is refused",
}
_MODULES = """source side_effects symbolic_convert trace_rules utils guards bytecode_analysis
bytecode_transformation""".split()  # noqa: SIM905 - one word a line is harder to read

# What makes an expression live: the names of attributes and parameters in which Dynamo keeps the
# objects of the program, and its methods that return them.
_ATTRIBUTES = frozenset(
    """
    value fn obj real_value py_obj script_obj value_type cls_source_value user_cls func fn_cls
    f_globals f_builtins f_locals __globals__ __closure__ wrapper_obj descriptor cv_obj
    frame_summary example_value cm_obj class_type exc_type fwd_fn bwd_fn mod module_type random
    raw_value
    """.split()  # noqa: SIM905
)
_METHODS = frozenset(
    """
    as_python_constant guard_as_python_constant python_type get_function get_fn get_real_value
    get_real_python_backed_value get_submodule as_python_literal get_python_type getattr_static
    _getattr_static import_module get_globals get_value get_torch_fn resolve_source_value peek_value
    peek_type _maybe_get_baseclass_method lookup_class_mro_attr lookup_cls_mro_attr
    lookup_metaclass_attr _check_for_getattr
    """.split()  # noqa: SIM905
)
_PARAMETERS = frozenset(
    """
    value fn obj cls func val module real_value klass typ method subobj attr_value mod descriptor
    e t v x src ty user_cls type_attr obj_type py_type type_info example_value
    """.split()  # noqa: SIM905
)
_OF_TRACKERS = re.compile("Variable|Source|Translator|Codegen|Tracker")
# Methods of Dynamo's own objects that are kept in an attribute with such a name.
_OWN_METHODS = frozenset(
    """
    call_function call_method var_getattr tp_getattro_impl as_proxy is_python_constant get_code
    is_python_equal get_name get_qualname get_module realize is_tensor is_constant_none items
    call_obj_hasattr set_context make_guard is_constant_match lookup_instance_dict
    """.split()  # noqa: SIM905
)
_QUESTIONS = frozenset(
    """
    getattr hasattr isinstance issubclass callable len dir vars type id hash iter sorted list tuple
    dict set repr str bool int float enumerate zip next any all frozenset reversed min max sum
    """.split()  # noqa: SIM905
)
_KEEPS_LIVE = ("getattr", "type", "dict", "list", "vars", "iter", "next", "tuple")
_PROCESS = re.compile(
    r"(importlib|os|sys|dist|platform|warnings|torch)(\.\w+)*\.(_functorch\.\w+|stack\w*|version|"
    r"_?(\w+_)?(is|get|has|are|cur|current|num|len|can|in|find|peek|dispatch)_\w+|environ|modules|"
    r"getenv|import_module|find_spec|device_count)"
)
_BUILDS = re.compile(
    r"((VariableTracker|variables|SourcelessBuilder)\.(build|create)|"
    r"SourcelessBuilder)$"
)
# Functions for people who read logs and errors.
_SHOWN = re.compile(r"__repr__|__str__|_\w*debug_\w+|reconstruct_pycode")
# Tables of functions that Dynamo calls, and of answers that it gives itself.
_FOLDS = re.compile(r"fold|tracing_state_functions|dispatch_key_set_functions", re.IGNORECASE)
_EXAMPLE = re.compile(r" ?\[([^\[\]]+)\]")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BINDS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)
_SCOPE = (*_FUNCTION, ast.ClassDef)


@dataclass
class Found:
    """What a function asks, in the words of its source, and the digest of the source."""

    asks: list[str] = field(default_factory=list)
    dumps: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.dumps).encode()).hexdigest()[:12]


@dataclass
class Row:
    """A row of the table.

    Attributes:
        how: a key of :data:`KINDS`.
        digests: of the function's source, by release.
        name: the module and the function, or a table of folds with one of its functions.
        note: what is asked, in words of the source; after a colon, where the answer is; in
            brackets, programs that ask it.
    """

    how: str
    digests: dict[str, str]
    name: str
    note: str

    @property
    def answer(self) -> str:
        """Where the answer is, in words."""
        return _EXAMPLE.sub("", self.note.partition(": ")[2]).strip()

    @property
    def examples(self) -> list[str]:
        """The names of programs that ask it."""
        return _EXAMPLE.findall(self.note)

    def __str__(self) -> str:
        shown = " ".join(f"{self.digests.get(release, '-'):12}" for release in RELEASES)
        return f"{self.how:7} {shown} {self.name}  {self.note}".rstrip()


class _Function(ast.NodeVisitor):
    """Finds the questions of one function, without those of the functions inside."""

    def __init__(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, outer: Iterable[str] = ()
    ) -> None:
        self.asks: dict[str, None] = {}
        self.live = set(outer)
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            annotation = ast.unparse(each.annotation) if each.annotation else ""
            self.live.discard(each.arg)
            if each.arg in _PARAMETERS and not _OF_TRACKERS.search(annotation):
                self.live.add(each.arg)
        if any(_name(each) == "classmethod" for each in function.decorator_list):
            self.live.discard("cls")
        before, nodes = -1, [node for node in _own_nodes(function) if isinstance(node, _BINDS)]
        while before < len(self.live):
            before = len(self.live)
            for node in nodes:
                self._note_names(node)
        for each in function.body:
            self.visit(each)

    def _note_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and self._is_live(node.value):
            for target in node.targets:
                self._note(target)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None and self._is_live(node.value):
                self._note(node.target)
        elif isinstance(node, (ast.For, ast.comprehension)) and self._is_live(node.iter):
            self._note(node.target)

    def _note(self, target: ast.expr) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self.live.add(each.id)

    def _is_live(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.live
        if isinstance(node, ast.Attribute):
            return node.attr in _ATTRIBUTES or self._is_live(node.value)
        if isinstance(node, ast.Subscript):
            return _text_of(node.slice) == "example_value" or self._is_live(node.value)
        if isinstance(node, ast.Starred):
            return self._is_live(node.value)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self._is_live(node.elt)
        if isinstance(node, ast.DictComp):
            return self._is_live(node.value)
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in _METHODS | _OWN_METHODS:
                return called.attr in _METHODS
            if _name(called) == "self.get":  # of the builder of guards
                return True
            name = _name(called)
            if name == "getattr" and len(node.args) > 1 and _text_of(node.args[1]) in _ATTRIBUTES:
                return True
            if name in _KEEPS_LIVE or name.startswith("inspect."):
                return any(map(self._is_live, node.args[:1]))
            return self._is_live(called)
        if isinstance(node, ast.IfExp):
            return self._is_live(node.body) or self._is_live(node.orelse)
        return isinstance(node, ast.BoolOp) and any(map(self._is_live, node.values))

    def _ask(self, word: str) -> None:
        self.asks.setdefault(word)

    def visit(self, node: ast.AST) -> None:
        """Leave out the texts of errors, and functions inside: they have their own rows."""
        if not isinstance(node, (*_SCOPE, ast.Raise)):
            super().visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "unimplemented" or name.startswith(("log.", "raise_")):
            return
        arguments = [*node.args, *(each.value for each in node.keywords)]
        is_live = any(map(self._is_live, arguments))
        if name in _QUESTIONS or name.startswith("inspect."):
            if node.args and self._is_live(node.args[0]) and not _is_of_trackers(name, node.args):
                self._ask(name)
        elif self._is_live(node.func) and not (
            isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS | _OWN_METHODS
        ):
            self._ask("call")
        elif name.endswith(("ConstantVariable", "ConstantVariable.create")) and is_live:
            self._ask("constant")
        elif _BUILDS.search(name) and is_live:
            self._ask("build")
        elif _PROCESS.match(name):
            self._ask(name)
        elif any(isinstance(each, ast.Starred) and self._is_live(each) for each in node.args):
            self._ask("call")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if self._is_live(node.left) or self._is_live(node.right):
            self._ask("operator")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _name(node)
        if name in ("sys.modules", "os.environ"):
            self._ask(name)
        elif node.attr not in _METHODS | _OWN_METHODS and (
            self._is_live(node.value) or node.attr in ("__dict__", "__mro__")
        ):
            self._ask(f".{node.attr}")
        self.generic_visit(node)


def _is_of_trackers(name: str, arguments: list[ast.expr]) -> bool:
    """Return whether a question is about the class of one of Dynamo's own objects."""
    is_of_class = name in ("isinstance", "issubclass") and len(arguments) > 1
    return is_of_class and bool(_OF_TRACKERS.search(ast.unparse(arguments[1])))


def _name(node: ast.expr) -> str:
    """Return a dotted name; ``""`` for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""


def _text_of(node: ast.expr) -> str:
    """Return a constant string; ``""`` for other expressions."""
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(function):
        yield each
        if not isinstance(each, _SCOPE):
            yield from _own_nodes(each)


def _dump(node: object, *, is_top: bool = True) -> str:
    """Return the text of syntax: without positions, docstrings, annotations and inner functions.

    It is the same in all releases of Python that parse the source.
    """
    if isinstance(node, list):
        return f"[{' '.join(_dump(each, is_top=False) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, _SCOPE) and not is_top:
        return f"(def {node.name})"
    skipped = ("annotation", "ctx", "kind", "returns", "type_comment", "type_params")
    parts = []
    for name, value in ast.iter_fields(node):
        if name in skipped or value is None or value == []:
            continue
        if name == "body" and isinstance(node, _SCOPE) and ast.get_docstring(node) is not None:
            value = value[1:]
        parts.append(f"{name}={_dump(value, is_top=False)}")
    return f"({type(node).__name__} {' '.join(parts)})"


def _scopes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for each in body:
        if isinstance(each, _SCOPE):
            yield each
        elif isinstance(each, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _scopes(ast.iter_child_nodes(each))


def _walk(
    body: Iterable[ast.AST], path: str, outer: Iterable[str], found: dict[str, Found]
) -> None:
    for each in _scopes(body):
        assert isinstance(each, _SCOPE)
        name = f"{path}{each.name}"
        if isinstance(each, ast.ClassDef):
            _walk(each.body, f"{name}.", outer, found)
        elif not _SHOWN.fullmatch(each.name):
            questions = _Function(each, outer)
            if questions.asks or _FOLDS.search(each.name):
                entry = found.setdefault(name, Found())
                entry.asks += [word for word in questions.asks if word not in entry.asks]
                entry.dumps.append(_dump(each))
            _walk(each.body, f"{name}.", questions.live, found)


def _tables(body: Iterable[ast.AST], path: str, found: dict[str, Found]) -> None:
    """Note the tables of folds: a row for each function of torch, or for a whole table."""
    for each in body:
        if isinstance(each, ast.ClassDef):
            _tables(each.body, f"{path}{each.name}.", found)
        elif isinstance(each, ast.If):
            _tables(each.body, path, found)
        target, value = _assigned(each)
        if value is None or not _FOLDS.search(target):
            continue
        items: list[ast.expr | None] = []
        for node in ast.walk(value):
            if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
                items += node.elts
            elif isinstance(node, ast.Dict):
                items += node.keys
        names = [ast.unparse(item) for item in items if item is not None]
        of_torch = [name for name in names if name.startswith("torch.")]
        for name in of_torch:
            found[f"{path}{target}[{name}]"] = Found(["call"], [name])
        if names and not of_torch:
            found[f"{path}{target}"] = Found(["call"], [_dump(value)])


def _assigned(statement: ast.AST) -> tuple[str, ast.expr | None]:
    """Return the name and the value of an assignment, or of ``table.extend(...)``."""
    if isinstance(statement, ast.Assign):
        return _name(statement.targets[0]), statement.value
    if isinstance(statement, ast.AnnAssign):
        return _name(statement.target), statement.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        arguments = statement.value.args
        return _name(statement.value.func).rpartition(".")[0], arguments[0] if arguments else None
    return "", None


def find(torch: Path) -> dict[str, Found]:
    """Return the functions and folds of a release that ask something, by name."""
    folder = torch / "_dynamo"
    every: dict[str, Found] = {}
    files = sorted((folder / "variables").glob("*.py"))
    for file in (*files, *(folder / f"{name}.py" for name in _MODULES)):
        if not file.exists():
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        found: dict[str, Found] = {}
        _walk(tree.body, "", (), found)
        _tables(tree.body, "", found)
        every |= {f"{module}:{name}": each for name, each in found.items()}
    return every


def table() -> list[Row]:
    """Return the rows of the table."""
    rows = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            how, *digests, rest = line.split(maxsplit=1 + len(RELEASES))
            name, _, note = rest.partition("  ")
            known = zip(RELEASES, digests, strict=True)
            rows.append(Row(how, {k: v for k, v in known if v != "-"}, name, note.strip()))
    return rows


def updated(rows: Iterable[Row], release: str, found: dict[str, Found]) -> list[Row]:
    """Return the rows with the digests of a release; a function that is new has no answer yet."""
    by_name = {row.name: row for row in rows}
    for row in by_name.values():
        row.digests.pop(release, None)
    for name, each in found.items():
        note = " ".join(each.asks)
        by_name.setdefault(name, Row("?", {}, name, note)).digests[release] = each.digest
    return [by_name[name] for name in sorted(by_name) if by_name[name].digests]


def write(rows: Iterable[Row]) -> None:
    """Write the table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    head = [line for line in lines if line.startswith("#")]
    TABLE.write_text("\n".join([*head, *map(str, rows)]) + "\n", encoding="utf-8")


def main(arguments: Iterable[str]) -> None:
    """Compute the table again for each RELEASE=FOLDER."""
    rows = table() if TABLE.exists() else []
    for each in arguments:
        release, _, folder = each.partition("=")
        rows = updated(rows, release, find(Path(folder)))
    write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
