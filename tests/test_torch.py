"""Against torch: its samples for attention, its inputs for nn.MultiheadAttention, a grid of ours.

And its tensors as arguments, of every kind: what they hold is read, or they are refused.

What torch calls is_causal is causal with align="top-left".  It computes the truth in float64.
"""

import warnings
from functools import partial

import numpy as np
import pytest
from public_calls import arrays, assert_equal, named

import qkv_ext
from qkv_ext._core._arrays import array_of

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # what torch.testing._internal needs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.masked import masked_tensor
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

sdpa = partial(qkv_ext.scaled_dot_product_attention, align="top-left")
expected_sdpa = torch.nn.functional.scaled_dot_product_attention


def wide(x):
    """An array as float64 for torch."""
    return torch.from_numpy(np.asarray(x, np.float64))


def assert_close(actual, expected, dtype="float32"):
    """float64 and float32 within rounding; half types are rounded once more."""
    eps = {"float64": 0, "float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    near = 1e-13 if dtype == "float64" else 2e-6
    expected = expected.numpy()
    scale = np.abs(expected).max(initial=0)
    assert actual.shape == expected.shape
    assert actual.dtype.name == dtype
    np.testing.assert_allclose(
        actual.astype(np.float64), expected, rtol=near + eps, atol=near * scale
    )


def compute_dtypes(backend):
    """float64 is the NumPy backend's alone."""
    return ("float32", "float64") if backend == "numpy" else ("float32",)


# ---- torch's own samples ------------------------------------------------------------------------


def samples():
    """The samples of scaled_dot_product_attention in torch's table of operators, no dropout."""
    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
        if sample.kwargs["dropout_p"] == 0:
            yield sample.input, *sample.args, {**sample.kwargs}


def test_count_of_samples():
    known = torch.__version__.startswith("2.13.")
    assert len(list(samples())) == 13 if known else len(list(samples())) >= 13


@pytest.mark.parametrize("sample", list(samples()), ids=lambda x: f"q{tuple(x[0].shape)}-k"
                         f"{tuple(x[1].shape)}-causal={x[3]['is_causal']}"
                         f"-mask={'attn_mask' in x[3]}".replace(" ", ""))  # fmt: skip
def test_samples(sample, backend):
    *inputs, options = sample
    mask = options.get("attn_mask")
    for dtype in compute_dtypes(backend):
        q, k, v = (x.numpy().astype(dtype) for x in inputs)
        q = q[(None,) * (k.ndim - q.ndim)]  # torch broadcasts ranks, where ours are equal
        own = None if mask is None else mask.numpy().astype(dtype)
        expected = expected_sdpa(
            wide(q), wide(k), wide(v), is_causal=options["is_causal"],
            attn_mask=None if mask is None else wide(own),
        )  # fmt: skip
        actual = sdpa(q, k, v, mask=own, causal=options["is_causal"], backend=backend)
        assert_close(actual, expected, dtype)


# ---- nn.MultiheadAttention ----------------------------------------------------------------------


def module_inputs():
    """(arguments of the constructor, forward's q, k, v, its masks) of torch's table of modules."""
    (info,) = (info for info in module_db if info.name == "nn.MultiheadAttention")
    torch.manual_seed(0)
    make = partial(info.module_inputs_func, info, device="cpu", dtype=torch.float64)
    for sample in make(requires_grad=False, training=False):
        yield sample.constructor_input.kwargs, sample.forward_input


def test_count_of_module_inputs():
    known = torch.__version__.startswith("2.13.")
    assert len(list(module_inputs())) == 64 if known else len(list(module_inputs())) >= 64


def with_random_biases(module):
    """The module, ready; biases start at zero, and weights are to be exact in float32 too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_((torch.randn_like(x) / module.embed_dim**0.5).float())
    return module.eval()


def layer_of(module, dtype):
    """Our layer with the weights of torch's, and what it joins to K and V: arrays (H, 1, D)."""
    state = {name: x.numpy().astype(dtype) for name, x in module.state_dict().items()}
    h = module.num_heads
    extras = [
        state.pop(name).reshape(h, 1, -1) if name in state else None
        for name in ("bias_k", "bias_v")
    ]
    return qkv_ext.MultiHeadAttention.from_state_dict(state, "", h), extras


def described(sample):
    arguments, forward = sample
    given = [name for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
             if arguments[name]]  # fmt: skip
    return (
        "-".join(given + [name for name, x in forward.kwargs.items() if x is not None]) or "plain"
    )


@pytest.mark.parametrize("sample", list(module_inputs()), ids=described)
def test_multihead_attention(sample, backend):
    """Keys and values are inputs of their own there, and may be joined by a bias and by a zero."""
    arguments, forward = sample
    module = with_random_biases(torch.nn.MultiheadAttention(**arguments, dtype=torch.float64))
    for dtype in compute_dtypes(backend):
        x, *contexts = (x.numpy().astype(dtype) for x in forward.args)
        with torch.no_grad():
            expected = module(
                *map(wide, (x, *contexts)), **forward.kwargs, average_attn_weights=False
            )
        layer, extras = layer_of(module, dtype)
        kv = [layer.project_kv(context, backend=backend)[i] for i, context in enumerate(contexts)]
        mask = np.ones((module.num_heads, len(x), len(contexts[0])), bool)
        for ignored in forward.kwargs.values():  # True is ignored there
            mask &= True if ignored is None else ~ignored.numpy()
        if arguments["add_bias_kv"]:
            kv = [np.concatenate(pair, axis=1) for pair in zip(kv, extras, strict=True)]
        if arguments["add_zero_attn"]:
            kv = [np.concatenate([part, np.zeros_like(part[:, :1])], axis=1) for part in kv]
        more = kv[0].shape[1] - mask.shape[-1]  # which no mask of theirs ignores
        mask = np.pad(mask, ((0, 0), (0, 0), (0, more)), constant_values=True)
        actual = layer(
            x, kv=qkv_ext.ProjectedKV(*kv), mask=mask, return_weights=True, backend=backend
        )
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_layer(causal, padded, backend, rng):
    """Self-attention of a batch of the usual size; theirs has no lengths, only masks."""
    module = torch.nn.MultiheadAttention(48, 6, batch_first=True, dtype=torch.float64)
    module = with_random_biases(module)
    for dtype in compute_dtypes(backend):
        x = rng.standard_normal((3, 20, 48)).astype(dtype)
        lengths = np.array([20, 1, 13])
        options = {"causal": causal, "kv_lengths": lengths if padded else None}
        if causal:
            options["align"] = "top-left"
        masks = {
            "key_padding_mask": torch.from_numpy(np.arange(20) >= lengths[:, None])
            if padded else None,
            "attn_mask": torch.from_numpy(~np.tri(20, dtype=bool)) if causal else None,
        }  # fmt: skip
        with torch.no_grad():
            expected = module(*(wide(x),) * 3, **masks, average_attn_weights=False)
        layer, _ = layer_of(module, dtype)
        actual = layer(x, return_weights=True, backend=backend, **options)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("decoder", [False, True])
def test_transformer_layers(decoder, backend, rng):
    """Their attention by its prefix, beside the MLP and the norms."""
    cls = torch.nn.TransformerDecoderLayer if decoder else torch.nn.TransformerEncoderLayer
    module = cls(24, 4, dim_feedforward=32, batch_first=True).eval()
    state = {f"layers.0.{name}": x for name, x in module.state_dict().items()}
    x, context = (rng.standard_normal((2, n, 24), np.float32) for n in (5, 7))
    for name in ("self_attn", "multihead_attn")[: 1 + decoder]:
        theirs = with_random_biases(getattr(module, name))
        ours = qkv_ext.MultiHeadAttention.from_state_dict(state, f"layers.0.{name}", 4)
        given = (x, x) if name == "self_attn" else (x, context)
        with torch.no_grad():
            expected, _ = theirs(*map(torch.from_numpy, (*given, given[1])))
        np.testing.assert_allclose(ours(*given, backend=backend), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "bias_k, bias_v, for which .*: it joins no key and value"),
    ],
)
def test_refused_modules(options, message):
    state = torch.nn.MultiheadAttention(8, 2, **options).state_dict()
    with pytest.raises(ValueError, match=message):
        qkv_ext.MultiHeadAttention.from_state_dict(state, "", 2)


# ---- a grid of our own --------------------------------------------------------------------------

SHAPES = {  # B, H, Hkv, L, S, D, Dv
    "square": (2, 4, 4, 33, 33, 16, 16),
    "gqa": (2, 6, 2, 17, 40, 32, 32),
    "mqa-cross": (1, 8, 1, 7, 300, 64, 64),
    "decode": (3, 8, 2, 1, 530, 64, 64),
    "more-queries": (1, 2, 2, 50, 9, 8, 8),
    "wide-v": (2, 3, 3, 20, 70, 24, 40),
    "narrow-v": (2, 4, 2, 20, 70, 40, 5),
    "long": (1, 2, 1, 270, 600, 32, 32),
    "one": (1, 1, 1, 1, 1, 1, 1),
}
MASKS = {
    "no-mask": None,
    "bool": lambda rng, shape: rng.random(shape) < 0.7,
    "empty-rows": lambda rng, shape: (
        (rng.random(shape) < 0.8) & (rng.random((*shape[:3], 1)) < 0.6)
    ),
    "float": lambda rng, shape: rng.standard_normal(shape),
    "inf": lambda rng, shape: np.where(
        rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)
    ),
    "padding": lambda rng, shape: (
        np.arange(shape[3]) < rng.integers(1, 1 + shape[3], (shape[0], 1, 1, 1))
    ),
}


def draw(name, mask, dtype, rng):
    b, h, hkv, length, s, d, dv = SHAPES[name]
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    if mask == "no-mask":
        return q, k, v, None
    return q, k, v, np.asarray(MASKS[mask](rng, (b, rng.choice([1, h]), length, s)))


SCALES = [(mask, None) for mask in MASKS] + [
    (mask, scale) for mask in ("no-mask", "inf") for scale in (0.3, -0.2, 0.0)
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("mask", "scale"), SCALES)
@pytest.mark.parametrize("name", SHAPES)
def test_grid(name, mask, scale, causal, backend, rng):
    for dtype in compute_dtypes(backend):
        q, k, v, own = draw(name, mask, dtype, rng)
        if own is not None and own.dtype != bool:
            own = own.astype(dtype)
        actual = sdpa(q, k, v, mask=own, causal=causal, scale=scale, backend=backend)
        assert_close(actual, of_torch(q, k, v, own, causal, scale), dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask", ["no-mask", "bool", "inf"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_half_types(name, dtype, mask, causal, backend, rng):
    """The float64 result of the same inputs, rounded once."""
    q, k, v, own = draw(name, mask, dtype, rng)
    actual = sdpa(q, k, v, mask=own, causal=causal, backend=backend)
    assert_close(actual, of_torch(q, k, v, own, causal, None), dtype)


def of_torch(q, k, v, mask, causal, scale):
    """torch takes a mask or causal order, never both: there the order goes into the mask.

    So it does where the scale is not positive: torch 2.13 scales the -inf of is_causal too.
    """
    if causal and (mask is not None or (scale is not None and scale <= 0)):
        order = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
        if mask is None or mask.dtype == bool:
            mask = order if mask is None else mask & order
        else:
            mask = np.where(order, mask, -np.inf)
        causal = False
    if mask is not None:
        mask = torch.from_numpy(mask) if mask.dtype == bool else wide(mask)
    return expected_sdpa(
        wide(q), wide(k), wide(v), attn_mask=mask, is_causal=causal, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


# ---- tensors as arguments -----------------------------------------------------------------------


def of_every_array(rows):
    return pytest.mark.parametrize(
        ("name", "function", "given", "value"),
        [row[1:] for row in rows],
        ids=[f"{call}-{name}" for call, name, *_ in rows],
    )


@of_every_array(list(arrays()))
def test_tensors_are_read(name, function, given, value):
    """Any strides; parameters without a gradient; what a mode of inference made."""
    expected = function(**given | {name: value})
    tensor = torch.from_numpy(value)
    with torch.inference_mode():
        inferred = tensor.clone()
    for x in (tensor, tensor.mT.contiguous().mT if value.ndim > 1 else tensor, inferred):
        assert_equal(function(**given | {name: x}), expected)
    if value.dtype == np.float32:
        assert_equal(function(**given | {name: torch.nn.Parameter(tensor).detach()}), expected)


def refusals(x):
    """Tensors that are not what their memory says, and what torch says is to be done."""
    x = torch.from_numpy(x)
    half = x.bfloat16()  # whose bits are read only where nothing else is in the way
    yield torch.nn.Parameter(x), r"\.detach\(\)"
    yield torch.nn.Parameter(half), r"\.detach\(\)"
    yield torch._neg_view(half), r"\.resolve_neg\(\)"
    yield half.to("meta"), r"\.cpu\(\)"
    yield half.to_sparse(), "SparseTensor"
    yield torch.complex(torch.zeros_like(x), -x).conj().imag, r"\.resolve_neg\(\)"  # G2
    yield torch.complex(x, x).conj(), r"\.resolve_conj\(\)"
    yield x.to("meta"), r"\.cpu\(\)"
    yield x.to_sparse(), r"\.to_dense\(\)"
    yield torch._efficientzerotensor(x.shape), "ZeroTensor"
    yield torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "QInt8"
    yield x.to(torch.float8_e4m3fn), "Float8_e4m3fn"
    yield masked_tensor(x, torch.ones_like(x, dtype=torch.bool)), "subclasses"
    with FakeTensorMode():
        fake = torch.ones(x.shape)
    yield fake, "subclasses"


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors", "ignore:.*deprecated")
@of_every_array([row for row in arrays() if row[-1].dtype == np.float32])
def test_tensors_are_refused(name, function, given, value):
    """G2: DLPack would give the memory of most of them, of another sign or of nothing."""
    for x, hint in refusals(value):
        with pytest.raises(TypeError, match=named(name)) as caught:
            function(**given | {name: x})
        assert caught.match(f"cannot be read as an array: .*({hint})")


def test_lazy_bits(backend):
    """G2: as V, as a mask, in a list, in a state dict; and resolved."""
    ones = torch.ones(1, 1, 2, 4)
    lazy = torch.complex(ones, 3 * ones).conj().imag
    with pytest.raises(TypeError, match=r"^v cannot be read as an array: .*\.resolve_neg\(\)"):
        sdpa(ones, ones, lazy, backend=backend)
    with pytest.raises(TypeError, match=r"^v cannot be read as an array: .*\.resolve_neg\(\)"):
        sdpa(ones, ones, [lazy[0]], backend=backend)
    assert (sdpa(ones, ones, lazy.resolve_neg(), backend=backend) == -3).all()
    w = {"in_proj_weight": torch.ones(12, 4), "out_proj.weight": torch._neg_view(torch.ones(4, 4))}
    with pytest.raises(TypeError, match=r"^out_proj\.weight cannot be .*\.resolve_neg\(\)"):
        qkv_ext.MultiHeadAttention.from_state_dict(w, "", 2)


def half(x):
    """The same numbers as a tensor and as an array of bfloat16."""
    x = torch.from_numpy(np.asarray(x, np.float32)).bfloat16()
    return x, x.float().numpy().astype(pytest.importorskip("ml_dtypes").bfloat16)


def test_bfloat16_tensors(backend, rng):
    """G3: everywhere, and without a copy."""
    q, k, v = (half(rng.standard_normal((2, 2, 5, 8))) for _ in "qkv")
    mask, slopes, sinks = (half(rng.standard_normal(n)) for n in ((5, 5), 2, 2))
    options = [
        {"mask": mask[i], "alibi_slopes": slopes[i], "sinks": sinks[i], "backend": backend}
        for i in (0, 1)
    ]
    expected = sdpa(q[1], k[1], v[1], **options[1])
    actual = sdpa(q[0], k[0], v[0], **options[0])
    assert actual.dtype == expected.dtype == q[1].dtype
    assert_equal(actual, expected)
    assert_equal(sdpa(q[0].mT.contiguous().mT, k[0], v[0], **options[0]), expected)
    assert np.shares_memory(array_of(q[0], "q"), q[0].view(torch.int16).numpy())

    caches = [qkv_ext.KVCache(2, 2, 8, dtype="bfloat16") for _ in range(2)]
    for i, cache in enumerate(caches):
        cache.append(k[i], v[i])
    assert_equal(caches[0].keys(1), caches[1].keys(1))
    assert_equal(*(cache.attend(q[i], backend=backend) for i, cache in enumerate(caches)))

    tables = [half(x) for x in qkv_ext.rotary_tables(5, 8)]
    turned = [qkv_ext.apply_rotary(q[i], *(x[i] for x in tables)) for i in (0, 1)]
    assert_equal(*turned)


def test_bfloat16_state_dicts(backend, rng):
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.bfloat16)
    module = with_random_biases(module)
    layer = qkv_ext.MultiHeadAttention.from_state_dict(module.state_dict(), "", 3)
    wide, _ = layer_of(module.float(), np.float32)
    x = rng.standard_normal((2, 5, 12), np.float32)
    assert_equal(layer(x, backend=backend), wide(x, backend=backend))


def test_the_readme_s_linear(backend, rng):
    """nn.Linear.weight (out, in) is weight.detach().T here."""
    linear = torch.nn.Linear(12, 7)
    x = rng.standard_normal((2, 5, 12), np.float32)
    weight, bias = linear.weight.detach().T, linear.bias.detach()
    expected = linear(torch.from_numpy(x)).detach()
    for w in (weight, qkv_ext.pack_weight(weight)):
        actual = qkv_ext.linear_projection(x, w, bias, backend=backend)
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    with pytest.raises(TypeError, match=r"^w cannot be read as an array: .*\.detach\(\)"):
        qkv_ext.linear_projection(x, linear.weight.T, backend=backend)


@pytest.mark.parametrize(
    ("activation", "theirs"),
    [("relu", torch.relu), ("gelu", torch.nn.functional.gelu), ("silu", torch.nn.functional.silu),
     ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"))],
)  # fmt: skip
def test_half_of_a_feed_forward_layer(activation, theirs, backend, rng):
    linear = torch.nn.Linear(12, 70)
    x, residual = torch.from_numpy(rng.standard_normal((40, 12), np.float32)), torch.randn(40, 70)
    weight, bias = linear.weight.detach().T, linear.bias.detach()
    for scale in (1, 100):
        expected = (theirs(linear(scale * x)) + residual).detach()
        actual = qkv_ext.linear_projection(
            scale * x, weight, bias, activation=activation, residual=residual, backend=backend
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=2e-6 * scale)


def test_numbers_and_integers_of_torch(backend):
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4), np.float32)
    expected = sdpa(x, x, x, scale=0.5, softcap=2.0, query_offset=1, backend=backend)
    actual = sdpa(x, x, x, scale=torch.tensor(0.5), softcap=torch.tensor(2),
                  query_offset=torch.tensor(1), backend=backend)  # fmt: skip
    assert_equal(actual, expected)
    with pytest.raises(TypeError, match=r"^scale is "):
        sdpa(x, x, x, scale=torch.tensor([0.5]), backend=backend)
