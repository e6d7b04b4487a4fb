"""How the modules of the package know each other."""

import ast
import re

from conftest import ROOT

PACKAGE = ROOT / "qkv_ext"


FOLDERS = ("_core", "_cache", "_layers", "")  #: each knows those before it; "" is what is public


def name_of(path):
    """Of a module, from the package on: "_core._rules", "cache"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}


def imports(path):
    """The modules of the package that one imports, wherever in it, but not for types alone."""
    found, types_alone = set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            types_alone |= {id(inner) for inner in ast.walk(node)}
        if id(node) in types_alone:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{name.name}" for name in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            full = [name.name for name in node.names]
        else:
            continue
        found |= {name.removeprefix("qkv_ext.") for name in full} & MODULES.keys()
    return found


def test_no_module_imports_itself_through_others():
    graph = {name: imports(path) for name, path in MODULES.items()}
    assert graph["attention"] >= {"_core._backends", "_core._check"}  # it is read at all
    assert "_core._numpy" in graph["_core._backends"]

    def walk(module, path):
        assert module not in path, " -> ".join((*path, module))
        for other in sorted(graph.get(module, ())):
            walk(other, (*path, module))

    for module in graph:
        walk(module, ())


def test_folders_know_each_other_one_way():
    for name, path in MODULES.items():
        own = FOLDERS.index(name.rpartition(".")[0])
        for other in imports(path):
            assert FOLDERS.index(other.rpartition(".")[0]) <= own, f"{name} imports {other}"


def test_what_a_call_is_imports_nothing_of_the_package():
    assert imports(MODULES["_core._problem"]) == set()


def test_cython_files_know_each_other_one_way():
    """No file is cut into another, and each .pxd knows those alone that types.pxd has before it."""
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "src").glob("*.p[yx][xdi]")}
    assert not [name for name, text in texts.items() if "\ninclude " in text]
    order = re.findall(r"^    (\w+) {2,}\w", texts["types.pxd"].split('"""')[1], re.MULTILINE)
    assert {f"{name}.pxd" for name in order} == {name for name in texts if name.endswith(".pxd")}
    for place, name in enumerate(order):
        known = re.findall(r"^from src\.(\w+) cimport", texts[f"{name}.pxd"], re.MULTILINE)
        assert set(known) <= set(order[:place]), name
