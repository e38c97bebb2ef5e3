"""Fuses the addition, relu or leaky relu that follows our operator in a graph into it."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple

from .symbols import (
    OUR_OPERATOR,
    RESIDUAL,
    ROLES,
    STOCK_OPERATORS,
    Graph,
    Node,
    NodeEntry,
    Users,
    is_fused,
    is_random,
    taken_apart,
)

if TYPE_CHECKING:
    import mxnet as mx
    from mxnet.gluon import Block, HybridBlock

_ORDER = (
    "a residual would change the order of calls with a state, of random numbers or of gradients "
    "that are added up"
)


class _End(NamedTuple):
    """Where the output of one of our nodes leaves its layout copy."""

    node: Node
    last: Node
    user: Node | None  # the only user of the output
    why: str | None  # why there is none


def fuse(graph: Graph) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Fuses what follows our nodes of a Graph into them, if nothing else uses their output.

    That is a relu, a leaky relu, or an ``elemwise_add``, whose other operand becomes the residual,
    perhaps with an activation after it. If both operands are our nodes, one takes the other as its
    residual, the first if it can. A residual must not change the order in which calls of one layer,
    random operators and third-party operators run, nor the order in which more than two gradients
    are added.

    Returns
    -------
    fused : list of (str, str)
        The names of nodes, and what was fused.
    left : list of (str, str)
        The names of nodes that stay as they are, and why.
    """
    users = graph.users()
    ends: dict[int, _End] = {}
    for node in graph.nodes():
        if node.operator in OUR_OPERATOR and not is_fused(node):
            last, (user, why) = node, _only_user(graph, users, node)
            if user and user.is_layout_copy:
                last, (user, why) = user, _only_user(graph, users, user)
            ends[id(last)] = _End(node, last, user, why)
    takers = _take_residuals(graph, ends)
    fused: list[tuple[str, str]] = []
    left: list[tuple[str, str]] = []
    new: dict[int, NodeEntry] = {}
    for node, last, user, why in ends.values():
        what = []
        if user and user.op == "elemwise_add":
            if takers.get(id(user)) is not node:
                why = "its output is the residual of another" if id(user) in takers else _ORDER
                left.append((node.name, why))
                continue
            what = ["residual"]
            after, _ = _only_user(graph, users, user)
            user = after if after and _activation(after) else user
        activation = user and _activation(user) or {}
        if not what and not activation:
            why = why or f"it is followed by {user.attrs.get('op_type', user.op)}"
            left.append((node.name, why))
            continue
        node.attrs.update(activation)
        fused.append((node.name, " + ".join([*what, *activation.get("activation", "").split()])))
        last.name = user.name
        new[id(user)] = last, 0
    graph.rewrite(lambda node: new.get(id(node)))
    return fused, left


def _take_residuals(graph: Graph, ends: Mapping[int, _End]) -> dict[int, Node]:
    """Gives nodes the other operand of an addition as their residual, unless that changes an order
    that matters. Returns {id of the addition: the node}."""
    takers: dict[int, Node] = {}
    replaced: dict[tuple[int, int], int] = {}
    before = None
    for node, last, user, _ in ends.values():
        if not user or user.op != "elemwise_add" or id(user) in takers:
            continue
        before = before or _order(graph, {})
        first, second = user.inputs
        residual = second if first[0] is last else first
        use = id(node), RESIDUAL
        if node.inputs[0][0].is_layout_copy:
            copy = Node("SwapAxis", f"{node.name}_residual", node.inputs[0][0].attrs, [residual])
            residual, use = (copy, 0), (id(copy), 0)
        user.inputs = [(last, 0)] * 2
        node.inputs.insert(RESIDUAL, residual)
        node.attrs["residual"] = "True"
        if _order(graph, {**replaced, use: id(user)}) == before:
            takers[id(user)] = node
            replaced[use] = id(user)
        else:
            user.inputs = [first, second]
            del node.inputs[RESIDUAL], node.attrs["residual"]
    return takers


def _order(graph: Graph, replaced: Mapping[tuple[int, int], int]) -> tuple[Any, Any]:
    """What must not change: the order of calls that share a state and of random operators, and the
    order in which MXNet adds the gradients of an entry.

    replaced: {(id of a node, number of its input): id of the addition that it replaces}
    """
    nodes = graph.nodes()
    calls: dict[str, list[int]] = collections.defaultdict(list)
    gradients: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for node in nodes:
        for state in _states(node):
            calls[state].append(id(node))
    for source, output in graph.heads:
        gradients[id(source), output].append(0)
    for node in reversed(nodes):
        for number, (source, output) in enumerate(node.inputs):
            user = replaced.get((id(node), number), id(node))
            gradients[id(source), output].append(user)
    # a + b has the bits of b + a.
    return calls, {entry: users for entry, users in gradients.items() if len(users) > 2}


def _states(node: Node) -> Iterator[str]:
    """The names of the running means that a node updates; "" for random and third-party
    operators."""
    inner = (part for graph in node.graphs() for part in graph.all_nodes())
    for each in (node, *inner):
        if each.operator in STOCK_OPERATORS or each.operator in OUR_OPERATOR:
            mean, _ = taken_apart(each)[2][ROLES.index("running_mean")]
            yield mean.name
        elif each.op == "Custom" or is_random(each, training=True):
            yield ""


def _only_user(graph: Graph, users: Users, node: Node) -> tuple[Node | None, str | None]:
    """(the only user of a node's outputs, None), or (None, why there is none)."""
    (user, number), *others = users[id(node)]
    if others:
        return None, f"its output has {1 + len(others)} consumers"
    if graph.entry(user, number)[1]:
        return None, "only its mean or variance is used"
    return user, None if user else "it is an output of the graph"


def _activation(node: Node) -> dict[str, str]:
    """The attributes that make our operator compute this activation; {} if it cannot."""
    kind = node.attrs.get("act_type")
    if node.op in ("relu", "_npx_relu") or node.op == "Activation" and kind == "relu":
        return {"activation": "relu"}
    if node.op == "LeakyReLU" and kind in (None, "leaky"):
        slope = node.attrs.get("slope", "0.25")
        return {"activation": "leaky_relu", "slope": slope} if float(slope) >= 0 else {}
    return {}


def fused(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """The symbol after :func:`fuse`."""
    graph = Graph(symbol)
    return graph.symbol_like(symbol) if fuse(graph)[0] else symbol


def start_fusing(block: HybridBlock) -> None:
    """Fuses the graphs that a HybridBlock compiles from now on."""
    vars(block)["_fuses"] = True


def stop_fusing(block: HybridBlock) -> None:
    del vars(block)["_fuses"]


def is_fusing(block: Block) -> bool:
    return "_fuses" in vars(block)
