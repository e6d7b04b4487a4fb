"""OpenVINO's ScaledDotProductAttention, float32 throughout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as op

from bench.kinds import Arrays, Attention, Outputs
from bench.rivals.base import Prepared, Rival, fold, grouped, room_for_scores


def repeated(key: Any, case: Attention) -> Any:
    """(B, Hkv, S, D) as (B, H, S, D) in the graph: the operator has no grouped heads."""
    b, h, hkv, _, s, d = case.shape
    whole = op.broadcast(op.unsqueeze(key, np.array([2])), np.array([b, hkv, h // hkv, s, d]))
    return op.reshape(whole, np.array([b, h, s, d]), False)


class OpenVINO(Rival):
    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.core = openvino.Core()
        self.line = f"OpenVINO {openvino.__version__.split('-')[0]} ScaledDotProductAttention"

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        if case.causal:
            room_for_scores(case, 1)
        folded = grouped(case) and not case.causal  # then the heads of a group can be rows
        inputs = {**arrays, "q": fold(case, arrays["q"])} if folded else arrays
        nodes = {name: op.parameter(x.shape, np.float32) for name, x in inputs.items()}
        q, k, v = nodes["q"], nodes["k"], nodes["v"]
        if grouped(case) and not folded:
            k, v = repeated(k, case), repeated(v, case)
        scale = None if case.scale is None else np.float32(case.scale)
        mask = nodes.get("mask")
        if mask is None and scale is not None:
            mask = np.float32(0)  # the operator takes a scale only after a mask
        node = op.scaled_dot_product_attention(q, k, v, mask, scale, causal=case.causal)
        request = self._request(node, list(nodes.values()))
        shape = arrays["q"].shape

        def unpack(result: Any) -> Outputs:
            return (np.array(result[0]).reshape(shape),)

        given = list(inputs.values())
        if case.overhead:  # arrays in, array out
            return Prepared(partial(request.infer, given, True, True), unpack)
        for place, x in enumerate(given):
            request.set_input_tensor(place, openvino.Tensor(x, shared_memory=True))
        return Prepared(partial(request.infer, None, True, True), unpack, given)

    def _request(self, node: Any, parameters: list[Any]) -> Any:
        model = openvino.Model([node], parameters)
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": self.threads,
        }
        return self.core.compile_model(model, "CPU", settings).create_infer_request()
