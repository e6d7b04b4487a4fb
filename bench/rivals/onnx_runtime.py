"""onnxruntime: the ONNX operators Attention (opset 23) and MatMul, and Microsoft's own.

Inputs and outputs are bound once (IO binding), which copies nothing.  The call overhead is measured
by run() instead, arrays in and array out, as it is for everybody: bound arrays are no arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from bench.kinds import Arrays, Attention, Outputs, Product, Skip
from bench.rivals.base import Prepared, Rival, grouped, room_for_scores

FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32


def session(node: Any, inputs: Arrays, outputs: dict[str, tuple[int, ...]], threads: int,
            constants: Arrays | None = None) -> Any:  # fmt: skip
    """A session of one operator."""
    kinds = {np.dtype(np.float32): FLOAT, np.dtype(np.int32): INT32}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(n, kinds[x.dtype], x.shape) for n, x in inputs.items()],
        [helper.make_tensor_value_info(n, FLOAT, shape) for n, shape in outputs.items()],
        [numpy_helper.from_array(x, n) for n, x in (constants or {}).items()],
    )
    sets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def bound(run: Any, inputs: Arrays, outputs: Arrays) -> Prepared:
    """A call on inputs and outputs that are bound now; its result is the first output.

    An array that is among both is bound once: the operator then writes where it reads.
    """
    values = {
        id(x): onnxruntime.OrtValue.ortvalue_from_numpy(x)
        for x in (*inputs.values(), *outputs.values())
    }
    binding = run.io_binding()
    for name, x in inputs.items():
        binding.bind_ortvalue_input(name, values[id(x)])
    for name, x in outputs.items():
        binding.bind_ortvalue_output(name, values[id(x)])
    first = values[id(next(iter(outputs.values())))]

    call = partial(run.run_with_iobinding, binding)
    return Prepared(call, lambda _: (first.numpy(),), (values, inputs, outputs))


def prepared(run: Any, case: Any, inputs: Arrays, outputs: Arrays) -> Prepared:
    if isinstance(case, Attention) and case.overhead:
        return Prepared(partial(run.run, None, inputs), lambda result: (result[0],))
    return bound(run, inputs, outputs)


def with_rows(case: Attention, arrays: Arrays) -> Arrays:
    """A mask has to have a row per query here: it is expanded once, before anything is timed."""
    if "mask" not in arrays:
        return arrays
    b, _, _, length, s, _ = case.shape
    every = np.broadcast_to(arrays["mask"], (b, 1, length, s))
    return {**arrays, "mask": np.ascontiguousarray(every)}


def attributes(case: Attention) -> dict[str, Any]:
    return {} if case.scale is None else {"scale": case.scale}


class Standard(Rival):
    """The operators of the ONNX standard."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.line = f"onnxruntime {onnxruntime.__version__} Attention (opset 23), MatMul"

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        room_for_scores(case, 1)
        inputs = with_rows(case, arrays)
        node = helper.make_node(
            "Attention", list(inputs), ["y"], is_causal=int(case.causal), **attributes(case)
        )
        y = np.empty_like(arrays["q"])
        run = session(node, inputs, {"y": y.shape}, self.threads)
        return prepared(run, case, inputs, {"y": y})

    def product(self, case: Product, arrays: Arrays) -> Prepared:
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        y = np.empty((case.shape[0], case.shape[2]), np.float32)
        return bound(session(node, arrays, {"y": y.shape}, self.threads), arrays, {"y": y})

    def packed(self, case: Product, arrays: Arrays) -> Prepared:
        """The weight as a constant of the model, which packs it when the session is made."""
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        y, x = np.empty((case.shape[0], case.shape[2]), np.float32), {"x": arrays["x"]}
        run = session(node, x, {"y": y.shape}, self.threads, {"w": arrays["w"]})
        return bound(run, x, {"y": y})


def in_rows(x: np.ndarray) -> np.ndarray:
    """(B, H, L, D) as (B, L, H·D)."""
    b, h, length, d = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(b, length, h * d)


class Contrib(Rival):
    """com.microsoft: MultiHeadAttention, or GroupQueryAttention where the heads are grouped."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.line = (
            f"onnxruntime {onnxruntime.__version__} MultiHeadAttention, "
            "GroupQueryAttention for grouped heads"
        )

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        made = self._grouped if grouped(case) else self._multi_head
        call, unpack, keep = made(case, arrays)
        b, h, _, length, _, d = case.shape

        def by_heads(result: Any) -> Outputs:
            return (unpack(result)[0].reshape(b, length, h, d).swapaxes(1, 2),)

        return Prepared(call, by_heads, keep)

    def _multi_head(self, case: Attention, arrays: Arrays) -> Prepared:
        h = case.shape[1]
        inputs = {name: in_rows(arrays[name]) for name in "qkv"}
        names = list(inputs)
        if case.mask:
            inputs["mask"] = with_rows(case, arrays)["mask"]
            names += ["", "", "mask"]
        node = helper.make_node(
            "MultiHeadAttention", names, ["y"], domain="com.microsoft",
            num_heads=h, unidirectional=int(case.causal), **attributes(case),
        )  # fmt: skip
        y = np.empty_like(inputs["q"])
        return prepared(session(node, inputs, {"y": y.shape}, self.threads), case, inputs, {"y": y})

    def _grouped(self, case: Attention, arrays: Arrays) -> Prepared:
        """As its users decode: the step's own key is appended, in place, to a buffer of S keys."""
        b, h, hkv, length, s, _ = case.shape
        if length not in (1, s) or (length == s and not case.causal):
            raise Skip("GroupQueryAttention is causal, and its queries are the last keys")
        cache = {f"past_{x}": arrays[x].copy() for x in "kv"}
        inputs = {
            "q": in_rows(arrays["q"]),
            "k": in_rows(arrays["k"][:, :, -length:]),
            "v": in_rows(arrays["v"][:, :, -length:]),
            **cache,
            "last": np.full(b, s - 1, np.int32),
            "total": np.array([s], np.int32),
        }
        outputs = {"y": np.empty_like(inputs["q"]),
                   "present_k": cache["past_k"], "present_v": cache["past_v"]}  # fmt: skip
        node = helper.make_node(
            "GroupQueryAttention", list(inputs), list(outputs), domain="com.microsoft",
            num_heads=h, kv_num_heads=hkv, **attributes(case),
        )  # fmt: skip
        shapes = {name: x.shape for name, x in outputs.items()}
        return bound(session(node, inputs, shapes, self.threads), inputs, outputs)
