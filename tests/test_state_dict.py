"""MultiHeadAttention.from_state_dict: the names and shapes that trained models come with."""

import numpy as np
import pytest

from qkv_ext import MultiHeadAttention, scaled_dot_product_attention

from_state_dict = MultiHeadAttention.from_state_dict


def draw(rng, **shapes):
    """Numbers of about 1 / √(in) by name; dots in the names are written as __."""
    return {
        name.replace("__", "."): (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def under(prefix, names):
    """The names with a prefix, among those of other layers."""
    others = draw(
        np.random.default_rng(0), other__query__weight=(3, 3), other__in_proj_weight=(9, 3)
    )
    return others | {f"{prefix}{name}": x for name, x in names.items()}


def formula(x, w, b, heads, **options):
    """The layer by its (out, in) weights and its biases, both by part."""
    h, hkv = heads
    q, k, v = (
        (x @ w[p].T + (0 if b.get(p) is None else b[p]))
        .reshape(*x.shape[:-1], n, len(w[p]) // n)
        .swapaxes(-3, -2)
        for p, n in (("q", h), ("k", hkv), ("v", hkv))
    )
    output = scaled_dot_product_attention(q, k, v, **options).swapaxes(-3, -2)
    output = output.reshape(*output.shape[:-2], -1)
    if w.get("o") is not None:
        output = output @ w["o"].T + (0 if b.get("o") is None else b["o"])
    return output


def assert_layer(layer, x, w, b, heads, backend):
    expected = formula(x, w, b, heads, causal=True, backend=backend)
    np.testing.assert_allclose(layer(x, causal=True, backend=backend), expected, atol=2e-6)
    assert layer(x[0], backend=backend).dtype == np.float32


every_prefix = pytest.mark.parametrize("prefix", ["", "a", "encoder.layers.0.self_attn", "ends."])


@every_prefix
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_torch_names(separate, bias, prefix, backend, rng):
    """nn.MultiheadAttention: in_proj_weight, or three weights where kdim or vdim are given."""
    names = draw(rng, out_proj__weight=(12, 12))
    if separate:
        names |= draw(rng, q_proj_weight=(12, 12), k_proj_weight=(12, 12), v_proj_weight=(12, 12))
        w = [names[f"{part}_proj_weight"] for part in "qkv"]
    else:
        names |= draw(rng, in_proj_weight=(36, 12))
        w = np.split(names["in_proj_weight"], 3)
    b = {}
    if bias:
        names |= draw(rng, in_proj_bias=(36,), out_proj__bias=(12,))
        b = dict(zip("qkv", np.split(names["in_proj_bias"], 3), strict=True))
        b["o"] = names["out_proj.bias"]
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    layer = from_state_dict(under(at, names), prefix, 4)
    w = dict(zip("qkv", w, strict=True)) | {"o": names["out_proj.weight"]}
    assert_layer(layer, rng.standard_normal((3, 5, 12), np.float32), w, b, (4, 4), backend)


def test_torch_names_with_fewer_key_heads(backend, rng):
    """Three weights may differ in height; the one bias is cut accordingly."""
    names = draw(rng, q_proj_weight=(32, 12), k_proj_weight=(16, 12), v_proj_weight=(8, 12),
                 in_proj_bias=(56,), out_proj__weight=(12, 16))  # fmt: skip
    w = {part: names[f"{part}_proj_weight"] for part in "qkv"} | {"o": names["out_proj.weight"]}
    b = dict(zip("qkv", np.split(names["in_proj_bias"], [32, 48]), strict=True))
    x = rng.standard_normal((3, 5, 12), np.float32)
    assert_layer(from_state_dict(names, "", 4, 2), x, w, b, (4, 2), backend)


MODULES = {  # names of the modules of Q, K, V and O
    "Llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "Llama, a layer": tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    "Whisper, CLIP": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "Whisper, a layer": (*(f"self_attn.{part}_proj" for part in "qkv"), "self_attn.out_proj"),
    "BertSelfAttention": ("query", "key", "value", None),
    "BertAttention": ("self.query", "self.key", "self.value", "output.dense"),
    "BertLayer": (*(f"attention.self.{name}" for name in ("query", "key", "value")),
                  "attention.output.dense"),
    "ViTLayer": (*(f"attention.attention.{name}" for name in ("query", "key", "value")),
                 "attention.output.dense"),
}  # fmt: skip


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("biases", ["", "qv", "qkvo"])
@every_prefix
def test_module_names(prefix, biases, modules, backend, rng):
    """A module for each projection; biases may be missing one by one, as Whisper's of K."""
    shapes = {"q": (32, 12), "k": (16, 12), "v": (16, 12), "o": (10, 32)}  # H 4, Hkv 2, D 8
    w, b, names = {}, {}, {}
    for part, module in zip("qkvo", modules, strict=True):
        if module is None:
            continue
        w[part] = names[f"{module}.weight"] = draw(rng, w=shapes[part])["w"]
        if part in biases:
            b[part] = names[f"{module}.bias"] = draw(rng, b=shapes[part][:1])["b"]
    names |= draw(rng, mlp__up_proj__weight=(7, 12), output__LayerNorm__weight=(12,))
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    layer = from_state_dict(under(at, names), prefix, 4, 2)
    assert_layer(layer, rng.standard_normal((3, 5, 12), np.float32), w, b, (4, 2), backend)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_dtypes(name, backend, rng):
    """Storage types become float32 once; float64 stays what it is."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8),
                 query__bias=(8,))  # fmt: skip
    names = {key: x.astype(dtype) for key, x in names.items()}
    x = rng.standard_normal((2, 5, 8))
    layer = from_state_dict(names, "", 2)
    if name == "float64":
        assert layer(x, backend="numpy").dtype == np.float64
        return
    x = x.astype(np.float32)
    wide = from_state_dict({key: w.astype(np.float32) for key, w in names.items()}, "", 2)
    output = layer(x, backend=backend)
    assert output.dtype == np.float32
    np.testing.assert_array_equal(output, wide(x, backend=backend))


def test_a_mixture_of_float_types(rng):
    """Biases are often float32 beside half weights."""
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8))
    names = {key: x.astype(np.float16) for key, x in names.items()} | draw(rng, query__bias=(8,))
    layer = from_state_dict(names, "", 2)
    assert layer(np.zeros((2, 5, 8), np.float32)).dtype == np.float32


class Tensor:
    """What np.asarray takes, and nothing else."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x, dtype)


class Elsewhere:
    """What a tensor of another device does."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert: copy the tensor to the memory of the host first")


def test_anything_that_asarray_takes(rng):
    names = draw(rng, q_proj__weight=(8, 8), k_proj__weight=(8, 8), v_proj__weight=(8, 8),
                 o_proj__weight=(8, 8))  # fmt: skip
    x = rng.standard_normal((2, 5, 8), np.float32)
    expected = from_state_dict(names, "", 2)(x)
    wrapped = {name: Tensor(w) for name, w in names.items()}
    np.testing.assert_array_equal(from_state_dict(wrapped, "", 2)(x), expected)


def test_it_keeps_its_weights(rng):
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8),
                 query__bias=(8,))  # fmt: skip
    x = rng.standard_normal((2, 5, 8), np.float32)
    layer = from_state_dict(names, "", 2)
    expected = layer(x)
    for array in names.values():
        array[...] = np.nan
    np.testing.assert_array_equal(layer(x), expected)


LLAMA = {f"a.{part}_proj.weight": np.zeros((8, 8), np.float32) for part in "qkvo"}
TORCH = {"a.in_proj_weight": np.zeros((24, 8), np.float32),
         "a.out_proj.weight": np.zeros((8, 8), np.float32)}  # fmt: skip
SEPARATE = {f"a.{part}_proj_weight": np.zeros((8, 8), np.float32) for part in "qkv"}


def without(names, name):
    return {key: x for key, x in names.items() if key != name}


@pytest.mark.parametrize(
    ("mapping", "prefix", "error", "messages"),
    [
        (LLAMA, "b", ValueError,
         ["no attention weights under prefix 'b.'", "in_proj_weight", "q_proj_weight",
          "q_proj.weight, k_proj.weight, v_proj.weight", "attention.self.query.weight",
          "none of its 4 names starts so"]),
        ({"a.c_attn.weight": np.zeros((8, 24)), **dict.fromkeys(map("a.{}".format, range(20)))},
         "a", ValueError, ["there are a.0, a.1", "..."]),
        ({}, "", ValueError, ["none of its 0 names"]),
        ({0: np.zeros(3)}, "a", ValueError, ["none of its 1 names starts so"]),
        (without(LLAMA, "a.k_proj.weight"), "a", ValueError, ["mapping has no a.k_proj.weight"]),
        (without(LLAMA, "a.o_proj.weight"), "a", ValueError,
         ["mapping has no a.o_proj.weight or a.out_proj.weight"]),
        (without(TORCH, "a.out_proj.weight"), "a", ValueError,
         ["mapping has no a.out_proj.weight"]),
        (without(SEPARATE, "a.v_proj_weight") | {"a.out_proj.weight": np.zeros((8, 8))}, "a",
         ValueError, ["mapping has no a.v_proj_weight"]),
        (TORCH | {"a.bias_k": np.zeros((1, 1, 8))}, "a", ValueError, ["mapping has a.bias_k"]),
        (LLAMA | {"a.q_norm.weight": np.ones(4)}, "a", ValueError, ["mapping has a.q_norm.weight"]),
        (LLAMA | {"a.q_proj.weight": np.zeros((8, 8), np.int8)}, "a", TypeError,
         ["a.q_proj.weight has dtype int8"]),
        (LLAMA | {"a.q_proj.weight": np.zeros((8, 8, 1), np.float32)}, "a", ValueError,
         [r"a.q_proj.weight has shape \(8, 8, 1\); expected \(out, in\)"]),
        (LLAMA | {"a.q_proj.bias": np.zeros((8, 1), np.float32)}, "a", ValueError,
         [r"a.q_proj.bias has shape \(8, 1\); expected \(out,\)"]),
        (LLAMA | {"a.q_proj.bias": np.zeros(7, np.float32)}, "a", ValueError,
         [r"b_q has shape \(7,\)"]),
        (LLAMA | {"a.q_proj.weight": Elsewhere()}, "a", TypeError,
         ["a.q_proj.weight is no array for NumPy: can't convert"]),
        (list(LLAMA), "a", TypeError, ["mapping is a list"]),
        (LLAMA, None, TypeError, ["prefix is None; expected a str"]),
    ],
)  # fmt: skip
def test_rejects(mapping, prefix, error, messages):
    with pytest.raises(error) as caught:
        from_state_dict(mapping, prefix, 2)
    for message in messages:
        assert caught.match(message)


def test_rejects_heads():
    with pytest.raises(ValueError, match="num_heads is 3"):
        from_state_dict(LLAMA, "a", 3, 2)
    with pytest.raises(ValueError, match="w_q has shape"):
        from_state_dict(LLAMA, "a", 3)
    with pytest.raises(ValueError, match="expected 16, "):  # thirds, and no GQA in them
        from_state_dict(TORCH, "a", 4, 2)


# ---- against torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"bias": False}], ids=str)
@pytest.mark.parametrize("prefix", ["", "attn"])
def test_against_torch(prefix, options, backend):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()
    if module.in_proj_bias is not None:  # torch starts them at 0
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    at = f"{prefix}." if prefix else ""
    layer = from_state_dict({at + n: x for n, x in module.state_dict().items()}, prefix, 3)
    x = torch.randn(2, 5, 12)
    context = torch.randn(2, 9, 6) if "kdim" in options else x
    expected, weights = module(x, context, context, average_attn_weights=False)
    output, actual = layer(x, context, return_weights=True, backend=backend)
    np.testing.assert_allclose(output, expected.detach(), atol=2e-6)
    np.testing.assert_allclose(actual, weights.detach(), atol=1e-6)
