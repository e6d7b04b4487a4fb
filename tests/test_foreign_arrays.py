"""Arrays of other libraries, for every argument that is an array (G2, G3).

They are played by small classes that answer as torch's and JAX's arrays do; tests/test_torch.py has
torch itself.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from public_calls import CALLS, arrays, assert_equal, named

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
NEGATED = (
    "Can't call numpy() on Tensor that has negative bit set. Use tensor.resolve_neg().numpy() "
    "instead."
)


class OnlyArray:
    """What NumPy reads by __array__, as pandas and xarray are."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x


class OldArray(OnlyArray):
    def __array__(self):
        return self.x


class OnlyInterface:
    def __init__(self, x):
        self.kept, self.__array_interface__ = x, x.__array_interface__


class OnlyDLPack:
    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """Before the versions of the protocol."""

    def __dlpack__(self, stream=None):
        return self.x.__dlpack__()


class NoDLPack(OnlyArray):
    """DLPack refuses, __array__ does not: JAX's bfloat16."""

    def __dlpack__(self, **options):
        raise RuntimeError("Unsupported dtype in DLTensor.")

    def __dlpack_device__(self):
        return 1, 0


class Lazy(OnlyDLPack):
    """DLPack hands out memory that has another sign, and __array__ knows it."""

    def __init__(self, x):
        super().__init__(-x if x.dtype.kind == "f" else np.zeros_like(x))
        self.right = x

    def __array__(self, dtype=None, copy=None):
        return self.right


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


READ = {
    "__array__": OnlyArray,
    "old __array__": OldArray,
    "__array_interface__": OnlyInterface,
    "DLPack": OnlyDLPack,
    "old DLPack": OldDLPack,
    "no DLPack": NoDLPack,
    "lazy": Lazy,
    "buffer": lambda x: memoryview(x),
    "read-only": read_only,
    "read-only buffer": lambda x: memoryview(read_only(x)),
}
ROWS = list(arrays())
every_array = pytest.mark.parametrize(
    ("name", "function", "given", "value"),
    [row[1:] for row in ROWS],
    ids=[f"{call}-{name}" for call, name, *_ in ROWS],
)


def test_the_table_is_whole():
    """Nothing that takes an array is left out, but for out and what holds arrays."""
    known = {(call, name) for call, name, *_ in ROWS}
    rest = {
        name
        for call, (_, _, kinds) in CALLS.items()
        for name, kind in kinds.items()
        if kind in ("array", "integers") and (call, name) not in known
    }
    assert rest == {"out", "mapping", "kv", "cache", "rotary", "past_key", "past_value"}


@every_array
def test_read(name, function, given, value):
    expected = function(**given | {name: value})
    for way, wrap in READ.items():
        assert_equal(function(**given | {name: wrap(value)}), expected, way)


REFUSALS = [
    RuntimeError(NEGATED),
    TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first."),
    ValueError("no copy was asked for"),
    BufferError("the memory is on another device"),
    AttributeError("no such thing"),
    NotImplementedError("not yet"),
    KeyError("key"),
    ArithmeticError("overflow"),
]


class Refusing(OnlyDLPack):
    """Its DLPack would hand something out."""

    def __init__(self, x, error):
        super().__init__(x)
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


class NowhereDLPack:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **options):
        raise self.error

    def __dlpack_device__(self):
        return 1, 0


@every_array
def test_refused_by_its_owner(name, function, given, value):
    """A TypeError that names the argument and has the words of the owner, never its memory."""
    for error in REFUSALS:
        for wrapped in (Refusing(value, error), NowhereDLPack(error)):
            with pytest.raises(TypeError, match=named(name)) as caught:
                function(**given | {name: wrapped})
            assert str(caught.value).endswith(f" cannot be read as an array: {error}")


@every_array
def test_out_of_memory_stays_that(name, function, given, value):
    with pytest.raises(MemoryError):
        function(**given | {name: Refusing(value, MemoryError())})


def test_a_state_dict():
    """G3: the values of a mapping are read by the same rule."""
    _, given, _ = CALLS["from_state_dict"]
    from_state_dict = qkv_ext.MultiHeadAttention.from_state_dict
    x = np.ones((3, 8), np.float32)
    expected = from_state_dict(**given)(x)
    for way, wrap in READ.items():
        mapping = {key: wrap(w) for key, w in given["mapping"].items()}
        assert_equal(from_state_dict(mapping, "", 2)(x), expected, way)
    for error in REFUSALS:
        mapping = given["mapping"] | {"in_proj_weight": Refusing(np.ones((24, 8)), error)}
        with pytest.raises(TypeError, match=r"^in_proj_weight cannot be read as an array: "):
            from_state_dict(mapping, "", 2)


def test_pairs_of_arrays(backend):
    """kv and rotary are pairs, and the past of ONNX is two arguments at once."""
    function, given, _ = CALLS["layer"]
    (cos, sin), x = given["rotary"], given["x"]
    expected = function(**given, backend=backend)
    for wrap in READ.values():
        assert_equal(function(x=x, rotary=(wrap(cos), wrap(sin)), backend=backend), expected)
    k = np.ones((1, 2, 3, 4), np.float32)
    expected = function(x=x, kv=(k, k), backend=backend)
    for wrap in READ.values():
        assert_equal(function(x=x, kv=(wrap(k), wrap(k)), backend=backend), expected)
    function, given, _ = CALLS["onnx.attention"]
    expected = function(**given, past_key=k, past_value=k, backend=backend)
    for wrap in READ.values():
        actual = function(**given, past_key=wrap(k), past_value=wrap(k), backend=backend)
        assert_equal(actual[:3], expected[:3])


def test_nothing_is_copied():
    from qkv_ext._core._arrays import array_of

    x = np.ones((3, 4), np.float32)
    for way in ("__array__", "__array_interface__", "DLPack", "no DLPack", "buffer"):
        assert np.shares_memory(array_of(READ[way](x), "x"), x), way


# ---- bfloat16 of torch --------------------------------------------------------------------------


class Bfloat16:
    """A dtype of another library."""

    def __str__(self):
        return "torch.bfloat16"


class Bfloat16Tensor:
    """Neither protocol gives it to NumPy, a view of its bits does."""

    dtype = Bfloat16()

    def __init__(self, bits, error=TypeError("Got unsupported ScalarType BFloat16")):  # noqa: B008
        self.bits, self.error = bits, error

    def __array__(self, dtype=None, copy=None):
        raise self.error

    def __dlpack__(self, **options):
        raise RuntimeError("Unsupported dtype in DLTensor.")

    def __dlpack_device__(self):
        return 1, 0

    def view(self, dtype):
        assert dtype == "torch.int16"
        if self.bits is None:
            raise NotImplementedError("Cannot access storage of SparseTensorImpl")
        return OnlyArray(self.bits)


@pytest.fixture
def a_torch(monkeypatch):
    """What the tensors above come from."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(int16="torch.int16"))


def test_bfloat16_is_a_view(a_torch, backend, rng):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (rng.standard_normal((1, 2, 5, 8)).astype(bfloat16) for _ in "qkv")
    mask = rng.standard_normal((5, 5)).astype(bfloat16)

    def tensor(x):
        return Bfloat16Tensor(x.view(np.int16))

    expected = sdpa(q, k, v, mask=mask, backend=backend)
    actual = sdpa(tensor(q), tensor(k), tensor(v), mask=tensor(mask), backend=backend)
    assert actual.dtype == bfloat16
    assert_equal(actual.view(np.int16), expected.view(np.int16))
    from qkv_ext._core._arrays import array_of

    assert np.shares_memory(array_of(tensor(q), "q"), q)


@every_array
def test_bfloat16_without_ml_dtypes(a_torch, monkeypatch, name, function, given, value):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"pip install ml_dtypes.*\.float\(\)") as caught:
        function(**given | {name: Bfloat16Tensor(np.zeros(value.shape, np.int16))})
    assert re.match(f"{named(name)} is a torch.bfloat16 tensor, ", str(caught.value)[-400:])


def test_bfloat16_that_torch_refuses_for_more(a_torch):
    """One that requires grad is refused for that, not read by its bits."""
    pytest.importorskip("ml_dtypes")
    x = np.zeros((1, 1, 2, 4), np.float32)
    grad = RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach()")
    with pytest.raises(TypeError, match=r"^k cannot be read as an array: .*detach\(\)"):
        sdpa(x, Bfloat16Tensor(np.zeros(x.shape, np.int16), grad), x)
    with pytest.raises(TypeError, match=r"^k cannot be read as an array: .*SparseTensorImpl"):
        sdpa(x, Bfloat16Tensor(None), x)
