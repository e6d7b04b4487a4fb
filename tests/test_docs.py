"""Every public name is documented, its examples run, and its signature reads like the others."""

import doctest
import inspect
import re
import types

import pytest

import qkv_ext

PUBLIC = {name: getattr(qkv_ext, name) for name in qkv_ext.__all__ if name != "__version__"}
FUNCTIONS = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}
LAYER = qkv_ext.MultiHeadAttention
METHODS = {
    f"MultiHeadAttention.{name}": getattr(LAYER, name)
    for name in ("from_fused", "from_fused_kv", "from_state_dict", "project_kv", "__call__")
} | {
    f"KVCache.{name}": method
    for name, method in vars(qkv_ext.KVCache).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
#: Nothing is computed by a backend here, or nothing is returned that out= could take.
PLAIN = ("alibi_slopes", "backends", "pack_weight", "rotary_inv_freq", "rotary_tables",
         "show_config")  # fmt: skip
WITHOUT_OUT = ("merge_attention",)
COMPUTING = [name for name in FUNCTIONS if name not in PLAIN]


def test_all_is_what_there_is():
    """__all__ names everything public in the namespace but its own modules, in order."""
    found = {
        name
        for name, x in vars(qkv_ext).items()
        if not name.startswith("_") and not isinstance(x, types.ModuleType)
    }
    assert found | {"__version__"} == set(qkv_ext.__all__)
    assert sorted(qkv_ext.__all__) == qkv_ext.__all__
    assert set(qkv_ext.__all__) <= set(dir(qkv_ext))


def test_version():
    assert qkv_ext.__version__[0].isdigit()


@pytest.mark.parametrize("name", PUBLIC)
def test_documented(name):
    doc = inspect.getdoc(PUBLIC[name])
    assert doc
    first = doc.splitlines()[0]
    assert first.endswith("."), f"the first line of {name} is no sentence: {first!r}"
    assert all(len(line) <= 100 for line in doc.splitlines())


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_sections(name):
    """Parameters, Returns, Raises and Examples, wherever there are any."""
    function = (FUNCTIONS | METHODS)[name]
    doc = inspect.getdoc(function)
    takes = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    expected = {
        "Parameters": bool(takes),
        "Returns": inspect.signature(function).return_annotation != "None",
        "Raises": name not in ("show_config", "backends"),
        "Examples": True,
    }
    missing = [
        title for title, wanted in expected.items()
        if wanted and f"{title}\n{'-' * len(title)}\n" not in doc
    ]  # fmt: skip
    assert not missing, f"{name} has no section {', '.join(missing)}"


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_parameters_are_described(name):
    """Each by its name in the section Parameters, in the order of the signature."""
    function = (FUNCTIONS | METHODS)[name]
    parameters = inspect.signature(function).parameters
    doc = inspect.getdoc(function)
    text = (
        re.split(r"\n\w+\n-{4,}\n", "\n" + doc)[1] if list(parameters) not in ([], ["self"]) else ""
    )
    heads = [line.split(" : ")[0] for line in text.splitlines() if line.strip() == line != ""]
    named = [part.strip().lstrip("*") for head in heads for part in head.split(",")]
    assert [p for p in parameters if p != "self" and p not in named] == []
    assert [n for n in named if n not in parameters] == []


@pytest.mark.parametrize("name", COMPUTING)
def test_signature(name):
    """threads and backend come last, are named and are None by default; options are named."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    if "options" in parameters:  # handed on to scaled_dot_product_attention
        assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD
        return
    assert list(parameters)[-2:] == ["threads", "backend"]
    options = ("threads", "backend") if name in WITHOUT_OUT else ("out", "threads", "backend")
    for option in options:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].default is None


def test_attend_takes_what_attention_takes():
    """With the same defaults, in the same order."""
    own = dict(inspect.signature(qkv_ext.scaled_dot_product_attention).parameters)
    cached = dict(inspect.signature(qkv_ext.KVCache.attend).parameters)
    del own["k"], own["v"], cached["self"]
    assert [(p.name, p.kind, p.default) for p in cached.values()] == [
        (p.name, p.kind, p.default) for p in own.values()
    ]


def test_options_of_layers_are_those_of_attention():
    """A new option of scaled_dot_product_attention reaches the projection calls."""
    from qkv_ext.attention import Options

    own = inspect.signature(qkv_ext.scaled_dot_product_attention).parameters
    named = {n for n, p in own.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(Options.__annotations__) == named - {"layout", "return_weights", "return_lse"}


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_examples_run(name):
    found = (PUBLIC | METHODS)[name]
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert runner.failures == 0, "".join(said)
    if name in FUNCTIONS:
        assert any(test.examples for test in tests), f"{name} has no example"
