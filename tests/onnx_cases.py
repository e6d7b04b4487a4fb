"""The node tests of the onnx package, as arrays.

onnx makes them when the module of an operator's tests is imported: each is a model of one node,
its inputs, and the outputs of onnx's own reference.  Here inputs and outputs have the names that
the operator's schema gives them, and those that a case leaves out are left out.
"""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.backend.test.case.node import _NodeTestCases


class Case(NamedTuple):
    name: str
    opset: int
    model: onnx.ModelProto
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def feed(self):
        """The inputs by the names that they have in the model."""
        names = (one.name for one in self.model.graph.input)
        return dict(zip(names, self.inputs.values(), strict=True))


def cases(module: str, op: str) -> list[Case]:
    """The cases of one operator; not those of the graphs that it expands to."""
    import_module(f"onnx.backend.test.case.node.{module}")
    ours = (x for x in _NodeTestCases if x.model.graph.node[0].op_type == op)
    return [_case(x) for x in ours if "_expanded" not in x.name]


def _case(test) -> Case:
    (node,) = test.model.graph.node
    (opset,) = (x.version for x in test.model.opset_import if x.domain == node.domain)
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    ((inputs, outputs),) = test.data_sets
    attributes = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    return Case(
        test.name,
        opset,
        test.model,
        attributes,
        _named(node.input, schema.inputs, inputs),
        _named(node.output, schema.outputs, outputs),
    )


def _named(used, formal, values) -> dict[str, np.ndarray]:
    names = [x.name for x, name in zip(formal, used, strict=False) if name]
    return {
        name: onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else np.asarray(x)
        for name, x in zip(names, values, strict=True)
    }
