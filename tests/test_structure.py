"""How the modules of the package know each other."""

import ast
import re

from conftest import ROOT

PACKAGE = ROOT / "qkv_ext"


def imports(path):
    """The modules of the package that one imports, wherever in it, but not for types alone."""
    found, types_alone = set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            types_alone |= {id(inner) for inner in ast.walk(node)}
        if id(node) in types_alone:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            if package == "qkv_ext":
                found |= {module} if module else {name.name for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                name.name.partition(".")[2]
                for name in node.names
                if name.name.startswith("qkv_ext.")
            }
    return found


def test_no_module_imports_itself_through_others():
    graph = {path.stem: imports(path) for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert graph["attention"] >= {"_backends", "_check"}  # it is read at all
    assert "_numpy" in graph["_backends"]

    def walk(module, path):
        assert module not in path, " -> ".join((*path, module))
        for other in sorted(graph.get(module, ())):
            walk(other, (*path, module))

    for module in graph:
        walk(module, ())


def test_what_a_call_is_imports_nothing_of_the_package():
    assert imports(PACKAGE / "_problem.py") == set()


def test_cython_files_know_each_other_one_way():
    """No file is cut into another, and each .pxd knows those alone that types.pxd has before it."""
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "src").glob("*.p[yx][xdi]")}
    assert not [name for name, text in texts.items() if "\ninclude " in text]
    order = re.findall(r"^    (\w+) {2,}\w", texts["types.pxd"].split('"""')[1], re.MULTILINE)
    assert {f"{name}.pxd" for name in order} == {name for name in texts if name.endswith(".pxd")}
    for place, name in enumerate(order):
        known = re.findall(r"^from src\.(\w+) cimport", texts[f"{name}.pxd"], re.MULTILINE)
        assert set(known) <= set(order[:place]), name
