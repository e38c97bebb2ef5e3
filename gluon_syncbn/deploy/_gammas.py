"""The gammas of an export, as its operators use them."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from ..graph.symbols import Graph, Node, is_in_place, settings_of


def set_fixed_gammas(graph: Graph, arrays: dict[str, Any]) -> None:
    """Writes 1 for each gamma that ``fix_gamma`` fixes: MXNet overwrites the value, and other
    readers may ignore the flag."""

    def is_fixed(node: Node) -> bool:
        return node is not None and node.op == "BatchNorm" and settings_of(node).fix_gamma

    users = graph.users()
    for norm in filter(is_fixed, graph.nodes()):
        gamma, _ = norm.inputs[1]
        if gamma.name in arrays:
            ones = mx.nd.ones_like(arrays[gamma.name])
            if not all(is_fixed(user) and number == 1 for user, number in users[id(gamma)]):
                gamma = Node("null", graph.free_name(f"{norm.name}_gamma"))
                norm.inputs[1] = gamma, 0
            arrays[gamma.name] = ones
    # Subgraphs refer to the same parameters by name.
    for norm in filter(is_fixed, graph.all_nodes()):
        name = norm.inputs[1][0].name
        if name in arrays:
            arrays[name] = mx.nd.ones_like(arrays[name])


def set_least_gammas(graph: Graph, arrays: dict[str, Any]) -> None:
    """Gives each in-place node a gamma of the magnitude that it uses, at least epsilon, and makes
    it work out of place."""
    users = graph.users()
    for norm in graph.nodes():
        gamma = is_in_place(norm) and norm.inputs[1][0]
        if not gamma or gamma.op != "null" or gamma.name not in arrays:
            continue
        norm.attrs["inplace"] = "False"
        value, least = arrays[gamma.name].asnumpy(), settings_of(norm).epsilon
        if len(users[id(gamma)]) > 1:
            gamma = Node("null", graph.free_name(f"{norm.name}_gamma"))
            norm.inputs[1] = gamma, 0
        value = np.where(np.abs(value) < least, np.copysign(least, value), value)
        arrays[gamma.name] = mx.nd.array(value, dtype=value.dtype)
