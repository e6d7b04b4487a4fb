"""The node tests of ONNX for the operators that this library has, and what the adapter adds.

Every case runs twice on every backend: its model in onnx's evaluator with our op in it, and its
arrays through the function.
"""

import re
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("onnx", minversion="1.23.2")
pytest.importorskip("ml_dtypes")

import ml_dtypes
import onnx
from onnx.reference import ReferenceEvaluator
from onnx_cases import cases

import qkv_ext
import qkv_ext.onnx

ATTENTION = cases("attention", "Attention")
ROTARY = cases("rotaryembedding", "RotaryEmbedding")
SOFTMAX = cases("softmax", "Softmax")
MATMUL = cases("matmul", "MatMul")
RTOL = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2**-6}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def by_name(name, group):
    return pytest.mark.parametrize(name, group, ids=lambda case: case.name)


def assert_close(actual, expected, what="output"):
    """Within the tolerance of the dtype; where values of both signs meet, they cancel."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    rtol, name = RTOL[expected.dtype.name], expected.dtype.name
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = expected[np.isfinite(expected)]
    cancels = name == "float32" and finite.min(initial=0) < 0 < finite.max(initial=0)
    atol = 1e-6 if cancels else 1e-7
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=what)


def assert_all_close(actual, expected):
    assert list(actual) == list(expected)
    for name, truth in expected.items():
        assert_close(actual[name], truth, name)


def in_evaluator(case, backend):
    """The outputs of the case's model, our op in the place of onnx's."""
    session = ReferenceEvaluator(case.model, new_ops=qkv_ext.onnx.reference_ops(backend=backend))
    assert type(session.rt_nodes_[0]).__module__ == "qkv_ext.onnx"
    return dict(zip(case.outputs, session.run(None, case.feed()), strict=True))


# ---- the cases of ONNX --------------------------------------------------------------------------


def test_counts():
    """None is lost by the way that the cases are found; a later onnx may have more of them."""
    known = onnx.__version__ == "1.23.2"
    for group, expected in ((ATTENTION, {23: 69, 24: 13, 25: 11}), (ROTARY, {23: 8}),
                            (SOFTMAX, {13: 7}), (MATMUL, {13: 7})):  # fmt: skip
        counts = Counter(case.opset for case in group)
        assert counts == expected if known else counts >= Counter(expected)


@by_name("case", ATTENTION)
def test_attention_in_the_evaluator(case, backend):
    assert_all_close(in_evaluator(case, backend), case.outputs)


@by_name("case", ATTENTION)
def test_attention(case, backend):
    outputs = qkv_ext.onnx.attention(
        **case.inputs, **case.attributes, opset=case.opset, backend=backend,
        return_qk_matmul_output="qk_matmul_output" in case.outputs,
    )  # fmt: skip
    names = ("Y", "present_key", "present_value", "qk_matmul_output")
    actual = dict(zip(names, outputs, strict=True))
    assert (actual["qk_matmul_output"] is None) == ("qk_matmul_output" not in case.outputs)
    assert_all_close({name: actual[name] for name in case.outputs}, case.outputs)


@by_name("case", ROTARY)
def test_rotary_embedding(case, backend):
    assert_all_close(in_evaluator(case, backend), case.outputs)
    actual = qkv_ext.onnx.rotary_embedding(**case.inputs, **case.attributes, backend=backend)
    assert_close(actual, case.outputs["Y"])


@by_name("case", SOFTMAX)
def test_softmax(case, backend):
    actual = qkv_ext.softmax(case.inputs["input"], **case.attributes, backend=backend)
    assert_close(actual, case.outputs["output"])


@by_name("case", MATMUL)
def test_matmul(case, backend):
    """Vectors are no operands of ours: their cases run as matrices of one row or column."""
    a, b = case.inputs["A"], case.inputs["B"]
    expected = case.outputs["Y"]
    if a.ndim == 1 or b.ndim == 1:
        name = "a" if a.ndim == 1 else "b"
        with pytest.raises(ValueError, match=f"{name} has shape .* expected at least 2 axes"):
            qkv_ext.matmul(a, b, backend=backend)
        a, b = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
        expected = expected.reshape(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]),
                                    a.shape[-2], b.shape[-1])  # fmt: skip
    assert_close(qkv_ext.matmul(a, b, backend=backend), expected)


def with_matrices(case):
    return all(x.ndim > 1 for x in case.inputs.values())


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@by_name("case", [*SOFTMAX, *filter(with_matrices, MATMUL), *ROTARY])
def test_half_types(case, dtype, backend):
    """Against onnx's own operator in float32, of the same inputs rounded."""
    feed = {name: x.astype(dtype) if x.dtype == np.float32 else x for name, x in
            case.feed().items()}  # fmt: skip
    function = {"Softmax": qkv_ext.softmax, "MatMul": qkv_ext.matmul,
                "RotaryEmbedding": qkv_ext.onnx.rotary_embedding}  # fmt: skip
    ours = function[case.model.graph.node[0].op_type]
    actual = ours(*feed.values(), **case.attributes, backend=backend)
    assert actual.dtype == dtype
    wide = {name: x.astype(np.float32) if x.dtype == dtype else x for name, x in feed.items()}
    (expected,) = ReferenceEvaluator(case.model).run(None, wide)
    rtol = RTOL[dtype.name]
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=rtol, atol=1e-7)


# ---- what the cases leave out -------------------------------------------------------------------


def means(v, length, past=0, **attributes):
    """Y (L,) where Q and K are zero, so that it is means of rows of V; the first ones are past."""
    v = np.float32(v).reshape(1, 1, -1, 1)
    zeros = np.zeros((1, 1, max(length, v.shape[2]), 4), np.float32)
    if past:
        attributes |= {"past_key": zeros[:, :, :past], "past_value": v[:, :, :past]}
    q, k = zeros[:, :, :length], zeros[:, :, past : v.shape[2]]
    y, *_ = qkv_ext.onnx.attention(q, k, v[:, :, past:], **attributes)
    return y.ravel().tolist()


def test_causal_order_stands_on_the_cache(backend):
    """B3 (onnx/onnx#8068, #8054, microsoft/onnxruntime#28958, #29020)."""
    v, options = range(5), {"is_causal": 1, "backend": backend}
    assert means(v, 2, nonpad_kv_seqlen=[5], **options) == [1.5, 2]
    assert means(v, 2, nonpad_kv_seqlen=[3], **options) == [0.5, 1]
    assert means(range(1, 6), 2, nonpad_kv_seqlen=[1], **options) == [0, 1]  # an empty row
    assert means(v, 2, nonpad_kv_seqlen=[0], **options) == [0, 0]
    assert means(v, 2, past=3, **options) == [1.5, 2]
    assert means(v, 1, past=3, **options) == [1.5]  # fewer queries than new keys
    assert means(v, 2, **options) == [0, 0.5]  # without a cache it starts at the first key
    assert means(v, 2, nonpad_kv_seqlen=[3], backend=backend) == [1, 1]


def test_windows_stand_on_the_cache(backend):
    v, options = range(5), {"left_window_size": 1, "right_window_size": 0, "backend": backend}
    assert means(v, 2, **options) == [0, 0.5]
    assert means(v, 2, past=3, **options) == [2.5, 3.5]
    assert means(v, 2, nonpad_kv_seqlen=[4], **options) == [1.5, 2.5]
    assert means(v, 1, left_window_size=-1, right_window_size=2, backend=backend) == [1]
    assert means(v, 2, right_window_size=2, is_causal=1, backend=backend) == [0, 0.5]


def test_steps_with_a_cache_equal_one_run(backend, rng):
    """B4 (onnx/onnx#7297): past keys are seen by every query."""
    q, k, v = (rng.standard_normal((2, h, 9, 8), np.float32) for h in (4, 2, 2))
    options = {"is_causal": 1, "backend": backend}
    whole, *_ = qkv_ext.onnx.attention(q, k, v, **options)
    past_key, past_value, rows = k[:, :, :0], v[:, :, :0], []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
        new = (slice(None), slice(None), slice(start, stop))
        y, past_key, past_value, _ = qkv_ext.onnx.attention(
            q[new], k[new], v[new], past_key=past_key, past_value=past_value, **options
        )
        rows.append(y)
    np.testing.assert_allclose(np.concatenate(rows, axis=2), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(past_key, k)
    np.testing.assert_array_equal(past_value, v)


def test_softcap_comes_before_the_mask(backend):
    """B5 (onnx/onnx#7867)."""
    mask = np.array([[True, False]])
    assert means([1, 100], 1, attn_mask=mask, softcap=2.0, backend=backend) == [1]


def test_neighbouring_heads_share_a_key_head(backend):
    """C1 (onnx/onnx#7274), with three axes as with four."""
    q, k = np.zeros((1, 4, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
    v = np.float32([10, 20]).reshape(1, 2, 1, 1)
    y, *_ = qkv_ext.onnx.attention(q, k, v, backend=backend)
    assert y.ravel().tolist() == [10, 10, 20, 20]
    y, *_ = qkv_ext.onnx.attention(
        *(x.reshape(1, 1, -1) for x in (q, k, v)), q_num_heads=4, kv_num_heads=2, backend=backend
    )
    assert y.tolist() == [[[10, 10, 20, 20]]]


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float16, BFLOAT16], ids=str)
def test_short_masks(dtype, backend):
    """From opset 24 on the keys beyond a mask are excluded; before it an axis of 1 broadcasts."""
    for mask in (np.ones((1, 2), bool), np.ones((2, 1, 1, 2), bool), np.ones(2, bool)):
        mask = mask if dtype is bool else np.zeros(mask.shape, dtype)
        for opset in (24, 25):
            q, v = np.zeros((2, 1, 3, 4), np.float32), np.arange(6, dtype=np.float32)
            v = v.reshape(2, 1, 3, 1)
            y, *_ = qkv_ext.onnx.attention(q, q, v, mask, opset=opset, backend=backend)
            assert y[:, 0, :, 0].tolist() == [[0.5] * 3, [3.5] * 3]
            y, *_ = qkv_ext.onnx.attention(q, q, v, mask[..., :1], opset=opset, backend=backend)
            assert y[:, 0, :, 0].tolist() == [[0] * 3, [3] * 3]
        with pytest.raises(ValueError, match="mask has shape"):
            qkv_ext.onnx.attention(q, q, v, mask, opset=23, backend=backend)
        y, *_ = qkv_ext.onnx.attention(q, q, v, mask[..., :1], opset=23, backend=backend)
        assert y[:, 0, :, 0].tolist() == [[1] * 3, [4] * 3]


def test_what_is_excluded_may_hold_anything(backend, rng):
    """A4: the padding of a cache is memory that nobody wrote; ONNX's reference spreads its NaN."""
    q, k, v = (rng.standard_normal((2, 2, n, 8), np.float32) for n in (3, 6, 6))
    options = {"is_causal": 1, "nonpad_kv_seqlen": [4, 3], "qk_matmul_output_mode": 3,
               "return_qk_matmul_output": True, "backend": backend}  # fmt: skip
    clean = qkv_ext.onnx.attention(q, k, v, **options)
    k[0, :, 4:], v[0, :, 4:], k[1, :, 3:], v[1, :, 3:] = np.nan, np.inf, np.inf, np.nan
    spoilt = qkv_ext.onnx.attention(q, k, v, **options)
    np.testing.assert_array_equal(spoilt[0], clean[0])
    np.testing.assert_array_equal(spoilt[3], clean[3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", range(4))
def test_scores_with_everything(mode, dtype, backend, rng):
    """The four modes with softcap, mask, window and cache at once, step by step in float64.

    Mode 0 is before softcap, as the operator's text and its function body have it.
    """
    if dtype == "float64" and backend != "numpy":
        pytest.skip("float64 is the NumPy backend's")
    shapes = [(2, 4, 3, 8), (2, 2, 2, 8), (2, 2, 2, 8), (2, 2, 5, 8), (2, 1, 3, 7)]
    q, k, v, past, mask = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    mask[0, 0, 1] = -np.inf  # a row without keys
    y, keys, values, scores = qkv_ext.onnx.attention(
        q, k, v, mask, past, past, softcap=1.5, scale=0.5, is_causal=1, left_window_size=4,
        qk_matmul_output_mode=mode, return_qk_matmul_output=True, backend=backend,
    )  # fmt: skip
    assert y.dtype == scores.dtype == dtype
    behind = np.arange(3)[:, None] + 5 - np.arange(7)
    expected = [0.5 * q.astype(np.float64) @ np.repeat(keys, 2, axis=1).swapaxes(-1, -2)]
    expected.append(1.5 * np.tanh(expected[0] / 1.5))
    expected.append(np.where((behind >= 0) & (behind <= 4), expected[1] + mask, -np.inf))
    terms = np.exp(expected[2])
    total = terms.sum(axis=-1, keepdims=True)
    expected.append(terms / np.where(total, total, 1))
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-13, "atol": 1e-14}
    np.testing.assert_allclose(scores, expected[mode], **near)
    np.testing.assert_allclose(y, expected[3] @ np.repeat(values, 2, axis=1), **near)


@pytest.mark.parametrize(("of_k", "of_v"), [("float16", "float32"), ("float32", "float16"),
                                            ("bfloat16", "float16")])  # fmt: skip
def test_values_may_have_another_dtype(of_k, of_v, backend, rng):
    """Y has the dtype of Q; nothing is lost on the way."""
    dtype = {"bfloat16": BFLOAT16}
    of_k, of_v = (dtype.get(name, np.dtype(name)) for name in (of_k, of_v))
    q, k, v = rng.standard_normal((3, 2, 2, 5, 8), np.float32)
    q, k, v = q.astype(of_k), k.astype(of_k), v.astype(of_v)
    y, present_key, present_value, _ = qkv_ext.onnx.attention(q, k, v, backend=backend)
    assert (y.dtype, present_key.dtype, present_value.dtype) == (of_k, of_k, of_v)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected = qkv_ext.scaled_dot_product_attention(*wide, backend=backend).astype(of_k)
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("outputs", [["Y"], ["Y", "", "", "QK"], ["Y", "PK", "PV"]], ids=len)
def test_outputs_that_a_node_leaves_out(outputs, rng, monkeypatch):
    """Scores are computed where the node has a fourth output, and only there."""
    traced = []
    monkeypatch.setattr(
        qkv_ext.onnx,
        "trace",
        lambda *x, **options: traced.append(1) or qkv_ext.trace(*x, **options),
    )
    node = onnx.helper.make_node("Attention", ["Q", "K", "V"], outputs, qk_matmul_output_mode=2)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [info(name, onnx.TensorProto.FLOAT, (1, 1, 3, 4)) for name in "QKV"],
        [info(name, onnx.TensorProto.FLOAT, None) for name in outputs if name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    session = ReferenceEvaluator(model, new_ops=qkv_ext.onnx.reference_ops())
    q, k, v = rng.standard_normal((3, 1, 1, 3, 4), np.float32)
    results = session.run(None, {"Q": q, "K": k, "V": v})
    assert len(results) == len([name for name in outputs if name])
    assert len(traced) == ("QK" in outputs)
    if "QK" in outputs:
        np.testing.assert_allclose(results[1], q @ k.swapaxes(-1, -2) / 2, rtol=1e-5, atol=1e-6)


def test_import_of_the_library_leaves_onnx_alone(python):
    code = "import sys, qkv_ext.onnx; print('onnx' in sys.modules, qkv_ext.onnx.__name__)"
    assert python(code) == "False qkv_ext.onnx"


def test_without_onnx(python):
    """The functions work, and the ops say what they need."""
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "import numpy as np, qkv_ext.onnx\n"
        "x = np.ones((1, 1, 2, 4), 'f4')\n"
        "print(qkv_ext.onnx.attention(x, x, x)[0].sum())\n"
        "try: qkv_ext.onnx.reference_ops()\n"
        "except ImportError as error: print(error)"
    )
    assert python(code).splitlines() == [
        "8.0",
        "reference_ops needs onnx: pip install qkv_ext[onnx]",
    ]


# ---- what is rejected ---------------------------------------------------------------------------

Q4, Q3 = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 4, 24), np.float32)
HEADS = {"q_num_heads": 3, "kv_num_heads": 3}
REJECTED = [
    ((Q4[0, 0],) * 3, {}, ValueError,
     "Q, K and V have shapes (4, 8), (4, 8) and (4, 8); expected 3 axes each or 4"),
    ((Q4, Q3, Q3), {}, ValueError,
     "Q, K and V have shapes (2, 3, 4, 8), (2, 4, 24) and (2, 4, 24); expected 3 axes each or 4"),
    ((Q3,) * 3, {"q_num_heads": 3}, ValueError,
     "kv_num_heads is None; expected a number, as K has shape (2, 4, 24)"),
    ((Q3,) * 3, {"q_num_heads": 5, "kv_num_heads": 3}, ValueError,
     "q_num_heads is 5; expected a divisor of 24: Q (2, 4, 24)"),
    ((Q3,) * 3, {"q_num_heads": 0, "kv_num_heads": 3}, ValueError,
     "q_num_heads is 0; expected a divisor of 24: Q (2, 4, 24)"),
    ((Q4,) * 3, HEADS, ValueError,
     "q_num_heads or kv_num_heads is given; expected neither with 4 axes"),
    ((Q4,) * 3, {"q_num_heads": 2, "opset": 24}, ValueError,
     "q_num_heads is 2; expected 3, as Q has"),
    ((Q4,) * 3, {"past_key": Q4}, ValueError,
     "one of past_key and past_value is given; expected both or none"),
    ((Q4,) * 3, {"past_key": Q4[:1], "past_value": Q4}, ValueError,
     "past_key has shape (1, 3, 4, 8); expected (2, 3, P, 8)"),
    ((Q4,) * 3, {"past_key": Q4, "past_value": Q4[0]}, ValueError,
     "past_value has shape (3, 4, 8); expected (2, 3, P, 8)"),
    ((Q4,) * 3, {"past_key": Q4.astype("f2"), "past_value": Q4}, TypeError,
     "past_key has dtype float16; expected float32: past_key.astype(np.float32)"),
    ((Q4,) * 3, {"past_key": Q4, "past_value": Q4, "nonpad_kv_seqlen": [1, 2]}, ValueError,
     "nonpad_kv_seqlen and past_key are given; expected one kind of cache"),
    ((Q4,) * 3, {"nonpad_kv_seqlen": [1, 2], "opset": 23}, ValueError,
     "nonpad_kv_seqlen came with opset 24; got one with opset 23"),
    ((Q4,) * 3, {"nonpad_kv_seqlen": [1, 5]}, ValueError,
     "kv_lengths holds 5; expected 0 to 4"),
    ((Q4,) * 3, {"left_window_size": 2, "opset": 24}, ValueError,
     "left_window_size and right_window_size came with opset 25; got one with opset 24"),
    ((Q4,) * 3, {"right_window_size": -2}, ValueError,
     "right_window_size holds -2; expected -1 to 1152921504606846976"),
    ((Q4,) * 3, {"qk_matmul_output_mode": 4}, ValueError,
     "qk_matmul_output_mode holds 4; expected 0 to 3"),
    ((Q4,) * 3, {"qk_matmul_output_mode": []}, ValueError,
     "qk_matmul_output_mode has shape (0,); expected an integer"),
    ((Q4,) * 3, {"softmax_precision": 7}, ValueError,
     "softmax_precision is 7; expected 1, 10, 11 or 16"),
    ((Q4,) * 3, {"softmax_precision": [1]}, ValueError,
     "softmax_precision has shape (1,); expected an integer"),
    ((Q4,) * 3, {"is_causal": "no"}, TypeError, "is_causal has dtype <U2; expected integers"),
    ((Q4,) * 3, {"is_causal": 2}, ValueError, "is_causal holds 2; expected 0 to 1"),
    ((Q4,) * 3, {"opset": "23"}, TypeError, "opset has dtype <U2; expected integers"),
    ((Q3,) * 3, {"q_num_heads": 2.0, "kv_num_heads": 2}, TypeError,
     "q_num_heads has dtype float64; expected integers"),
    ((Q4, np.ma.masked_array(Q4), Q4), {}, TypeError,
     "K is a numpy.ma.MaskedArray; expected a plain array and mask="),
    ((Q4,) * 3, {"softcap": -1.0}, ValueError,
     "softcap is -1.0; expected a positive finite number or None"),
    # an array of times was to be filled with -inf, of which NumPy warned
    ((Q4,) * 3, {"attn_mask": np.zeros(1, "M8[s]"), "opset": 24}, TypeError,
     "mask has dtype datetime64[s]; expected bool or floating point: bool or a float dtype"),
    ((Q4,) * 3, {"attn_mask": np.ones((4, 2), np.int64)}, TypeError,
     "mask has dtype int64; expected bool or floating point: mask.astype(bool), "
     "True keeps a key"),
    ((Q4, Q4, Q4.astype(int)), {}, TypeError,
     "v has dtype int64; expected float32, float64, float16 or bfloat16"),
    ((Q4, Q4.astype("f2"), Q4), {}, TypeError,
     "q, k, v have different dtypes (q float32, k float16, v float32); expected one dtype, as "
     "k.astype(np.float32) gives"),
    ((Q4,) * 3, {"opset": 22}, ValueError, "opset is 22; expected 23, 24, 25 or later"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "kind", "message"), REJECTED,
                         ids=[message for *_, message in REJECTED])  # fmt: skip
def test_rejected(arrays, options, kind, message, backend):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        qkv_ext.onnx.attention(*arrays, **options, backend=backend)


@pytest.mark.parametrize(("x", "tables", "options", "message"), [
    (Q4[0, 0], (4, 4), {}, "X has shape (4, 8); expected 3 axes or 4"),
    (Q3, (2, 4, 4), {}, "num_heads is None; expected a number, as X has shape (2, 4, 24)"),
    (Q4, (4, 4), {}, "cos_cache has shape (4, 4); without position_ids expected (2, 4, ...), as X "
     "has shape (2, 3, 4, 8)"),
])  # fmt: skip
def test_rejected_by_rotary_embedding(x, tables, options, message, backend):
    tables = np.zeros(tables, np.float32)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        qkv_ext.onnx.rotary_embedding(x, tables, tables, **options, backend=backend)
