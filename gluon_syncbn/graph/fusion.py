"""Fuses what follows our operator in a graph into it: an addition, a relu, a leaky relu."""

import functools
from typing import NamedTuple, Optional

from ..layers.operator import is_numpy
from .symbols import OUR_OPERATOR, RESIDUAL, Graph, Node, is_fused


class _End(NamedTuple):
    """Where the output of one of our nodes leaves its layout copy."""

    node: Node
    last: Node
    user: Optional[Node]  # what alone takes the output
    why: Optional[str]  # why there is none


def fuse(graph):
    """Fuses what follows our nodes of a Graph into them, where nothing else takes their output.

    That is relu, a leaky relu, or ``elemwise_add``, whose other operand becomes the residual, with
    or without one of these after it. Of two such operands the first takes the other.

    Returns
    -------
    fused : list of (str, str)
        The names of nodes, and what was fused.
    left : list of (str, str)
        The names of nodes that stay as they are, and why.
    """
    users = graph.users()
    ends = {}
    for node in graph.nodes():
        if node.operator in OUR_OPERATOR and not is_fused(node):
            last, (user, why) = node, _only_user(graph, users, node)
            if user and user.is_layout_copy:
                last, (user, why) = user, _only_user(graph, users, user)
            ends[id(last)] = _End(node, last, user, why)
    fused, left, new = [], [], {}
    for node, last, user, why in ends.values():
        settings, residual = {}, None
        if user and user.op == "elemwise_add":
            first, second = user.inputs
            if first[0] is not last and id(first[0]) in ends and ends[id(first[0])].user is user:
                left.append((node.name, "its output is the residual of another"))
                continue
            residual = second if first[0] is last else first
            settings["residual"] = "True"
            after, _ = _only_user(graph, users, user)
            if after and _activation(after):
                user = after
                settings.update(_activation(after))
        elif user:
            settings.update(_activation(user))
        if not settings:
            left.append((node.name, why or f"it is followed by {user.operator}"))
            continue
        if residual:
            x, _ = node.inputs[0]
            if x.is_layout_copy:
                copy = Node("SwapAxis", f"{node.name}_residual", x.attrs, [residual])
                residual = copy, 0
            node.inputs.insert(RESIDUAL, residual)
        node.attrs.update(settings)
        if last is not node:
            last.name = user.name
        new[id(user)] = last, 0
        what = ["residual"] if residual else []
        fused.append((node.name, " + ".join([*what, *filter(None, [settings.get("activation")])])))
    graph.rewrite(lambda node: new.get(id(node)))
    return fused, left


def _only_user(graph, users, node):
    """(the node that alone takes the outputs of a node, None), or (None, why there is none)."""
    (user, number), *others = users[id(node)]
    if others:
        return None, f"its output has {1 + len(others)} consumers"
    if graph.entry(user, number)[1]:
        return None, "only its mean or variance is used"
    return user, None if user else "it is an output of the graph"


def _activation(node):
    """The attributes with which our operator computes a node too; {} if it cannot."""
    if node.op in ("relu", "_npx_relu") or node.attrs.get("act_type") == "relu":
        return {"activation": "relu"}
    if node.op == "LeakyReLU" and node.attrs.get("act_type", "leaky") == "leaky":
        slope = node.attrs.get("slope", "0.25")
        return {"activation": "leaky_relu", "slope": slope} if float(slope) >= 0 else {}
    return {}


def fused(symbol):
    """The symbol after :func:`fuse`."""
    graph = Graph(symbol)
    if not fuse(graph)[0]:
        return symbol
    return graph.symbol().as_np_ndarray() if is_numpy(symbol) else graph.symbol()


def start_fusing(block):
    """Fuses the graphs that a HybridBlock compiles from now on."""
    # The attribute hides the method of HybridBlock.
    vars(block)["_get_graph"] = functools.partial(_fused_graph, block)


def stop_fusing(block):
    del vars(block)["_get_graph"]


def is_fusing(block):
    return "_get_graph" in vars(block)


def _fused_graph(block, *args):
    if not block._cached_graph:
        inputs, symbol = type(block)._get_graph(block, *args)
        block._cached_graph = inputs, fused(symbol)
    return block._cached_graph
