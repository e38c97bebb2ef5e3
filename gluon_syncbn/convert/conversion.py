"""Makes the batch normalization of a built net synchronized, and plain again."""

import collections
import functools
import logging
from typing import NamedTuple, Tuple

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn.basic_layers import _BatchNorm

from ..graph.blocks import check_block, clear_caches, walk
from ..graph.symbol_block import SyncGraph, put_in, read_graph, spliced, take_out
from ..graph.symbols import OUR_OPERATOR, STOCK_OPERATORS
from ..layers.batch_norm import SyncBatchNorm, SyncBatchNormReLU
from ..layers.virtual import VirtualBatchNorm

_log = logging.getLogger("gluon_syncbn")

# What a SyncBatchNorm has and nn.BatchNorm has not.
_OWN_ATTRIBUTES = (
    "_layer",
    "_node_ids",
    "_num_devices",
    "_own_group",
    "_running_variance",
    "_virtual_devices",
)
# A class of somebody else's that computes what nn.BatchNorm does, only not with cuDNN.
_SAME_AS_STOCK = ("gluoncv.nn.block.BatchNormCudnnOff",)
# What a subclass may define and still compute the same.
_HARMLESS = {"__init__", "__repr__", "_alias", "__doc__", "__module__", "__qualname__", "__dict__"}
_HARMLESS |= {"__weakref__", "__annotations__", "__firstlineno__", "__static_attributes__"}
# Settings that do not change what is computed, and those of contrib for whom to meet.
_IGNORED_SETTINGS = {"cudnn_off", "ndev", "key"}


_CUMULATIVE = "it has momentum=None, and nn.BatchNorm knows no cumulative average."
_VIRTUAL = "its devices do not synchronize, which is what it is for"


class Replaced(NamedTuple):
    """A layer that was replaced: where it is, its name, what it was and what it is."""

    path: str
    name: str
    before: str
    after: str


class Refused(NamedTuple):
    """A layer that was left as it is: where it is, its name, what it is and why."""

    path: str
    name: str
    kind: str
    why: str


class Report(NamedTuple):
    """What a conversion did.

    Attributes
    ----------
    replaced : tuple of Replaced
        One entry for each layer, be it used in several places, in the order of the net. `path` is
        where it is, as in the files of ``save_parameters``; within a SymbolBlock a colon and the
        name of the node follow.
    already : tuple of str
        The paths of those that were what they should become.
    refused : tuple of Refused
        What was left as it is.
    """

    replaced: Tuple[Replaced, ...]
    already: Tuple[str, ...]
    refused: Tuple[Refused, ...]

    def __str__(self):
        kinds = collections.Counter((entry.before, entry.after) for entry in self.replaced)
        parts = ", ".join(f"{n} {before} -> {after}" for (before, after), n in kinds.items())
        text = f"{len(self.replaced)} layers replaced" + (f" ({parts})" if parts else "")
        text += f", {len(self.already)} were so already" if self.already else ""
        text += f", {len(self.refused)} not replaced" if self.refused else ""
        reasons = {}
        for entry in self.refused:
            reasons.setdefault((entry.kind, entry.why), []).append(entry.path or "the net itself")
        for (kind, why), paths in reasons.items():
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            text += f"\n  {kind} ({', '.join(paths[:3])}{more}): {why}"
        return text


def convert_sync_batchnorm(net, group=None, num_devices=None, also=(), return_report=False):
    """Makes the batch normalization of a built net synchronized.

    ``nn.BatchNorm``, ``nn.BatchNormReLU``, the contrib ``SyncBatchNorm`` and subclasses that do no
    more than set arguments become :class:`SyncBatchNorm`, or :class:`SyncBatchNormReLU`, wherever
    they are in the net: children, attributes, lists, tuples, sets and dicts of blocks, and the
    graph of a SymbolBlock, be it imported from a file or the features of gluoncv's SSD and FPN
    detectors.

    A layer stays the same object and becomes one of another class. So it keeps its Parameter
    objects (with values, initialization, contexts, grad_req, lr_mult, sharing), its name, place,
    settings and hooks. Whoever refers to it goes on working, such as a Trainer made before, and
    files written before and after fit both. What ``hybridize()`` has compiled is compiled anew.

    What was replaced is logged at level INFO by the logger ``gluon_syncbn``; what was not, or that
    there was nothing, as a warning.

    Neither replaced nor reported are layers that only a function or an object other than a Block
    refers to, as they are not found, and blocks that call ``F.BatchNorm`` by themselves. A block
    around `net` that was hybridized and has run keeps its compiled graph, with the old layers: call
    its ``hybridize()`` again. A layer that `net` shares with another net is synchronized there too.

    Parameters
    ----------
    net : Block
        Initialized or not, hybridized or not, on any contexts. It is changed in place.
    group : SyncGroup, optional
        Which devices and processes take part, as for :class:`SyncBatchNorm`. Where it is given,
        layers that are synchronized already take it over.
    num_devices : int, optional
        How many devices take part, likewise. By default all on which the parameters live; the
        number in a contrib layer is not taken over.
    also : type or sequence of types, default ()
        Subclasses of ``nn.BatchNorm`` that are replaced although they have code of their own, which
        is not called any more then.
    return_report : bool, default False
        Whether to return a :class:`Report` too.

    Returns
    -------
    net : Block
        The same object. With `return_report`, (net, report).

    Raises
    ------
    ValueError
        For anything but a Block, and for arguments that make no sense. The net is then as it was
        before.

    References
    ----------
    PyTorch's ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does this for its modules.
    """
    check_block(net, "convert_sync_batchnorm")
    also = _check_types(also)
    # Checks the arguments, and has all that a layer is to get.
    template = SyncBatchNorm(prefix="", num_devices=num_devices, group=group)
    given = {}
    if group is not None:
        given["_own_group"] = template._own_group
    if num_devices is not None:
        given["_num_devices"] = template._num_devices
    found = list(walk(net))
    replaced, already, refused, undo = [], [], [], []

    def synchronize(layer, path, name, before):
        undo.append(functools.partial(_make_stock, layer))
        _make_synchronized(layer, template)
        replaced.append(Replaced(path, name, before, _kind(layer)))

    def take_over(layer, path):
        already.append(path)
        if given:
            undo.append(functools.partial(_set, layer, {name: vars(layer)[name] for name in given}))
            _set(layer, given)

    try:
        for path, block in found:
            if isinstance(block, VirtualBatchNorm):
                why = f"{_VIRTUAL}: revert it first."
                refused.append(Refused(path, block.name, _kind(block), why))
            elif isinstance(block, SyncBatchNorm):
                take_over(block, path)
            elif isinstance(block, _BatchNorm):
                why = _why_not(block, also, template)
                if why:
                    refused.append(Refused(path, block.name, _kind(block), why))
                else:
                    synchronize(block, path, block.name, _kind(block))
            elif isinstance(block, SyncGraph):
                for node in block._nodes:
                    take_over(node.layer, f"{path}:{node.name}")
            elif isinstance(block, SymbolBlock):
                nodes, left = read_graph(block, {**STOCK_OPERATORS, **OUR_OPERATOR})
                refused += [Refused(f"{path}:{name}", name, *why) for name, *why in left]
                refused += [
                    Refused(f"{path}:{node.name}", node.name, node.operator, f"{_VIRTUAL}.")
                    for node in nodes
                    if node.is_virtual
                ]
                nodes = [node for node in nodes if not node.is_virtual]
                for node in nodes:
                    if not isinstance(node.layer, SyncBatchNorm):
                        synchronize(node.layer, f"{path}:{node.name}", node.name, node.operator)
                        node.layer._running_variance = node.running_variance
                if nodes:
                    undo.append(functools.partial(take_out, block))
                    put_in(block, nodes)
    except Exception:
        for step in reversed(undo):
            step()
        raise
    if replaced:
        clear_caches(found)
    report = Report(tuple(replaced), tuple(already), tuple(refused))
    return _finish(net, "convert_sync_batchnorm", report, return_report)


def revert_sync_batchnorm(net, return_report=False):
    """Makes the synchronized batch normalization of a net what it was before.

    What :func:`convert_sync_batchnorm` has replaced becomes again what it was. A layer that was
    made as :class:`SyncBatchNorm` becomes ``nn.BatchNorm``, or ``nn.BatchNormReLU``. So does what a
    graph contains that was exported from a synchronized net. Nothing of this package is left in the
    net then.

    What nn.BatchNorm has no setting for goes: its running variance is the biased one on the CPU and
    the unbiased one through cuDNN, and virtual devices become one.

    As there, a layer stays the same object, with its Parameter objects, place, hooks and settings,
    those changed in the meantime included. It waits for all that MXNet has still to compute, as the
    last steps may have to be exchanged with other processes.

    Parameters
    ----------
    net : Block
        Changed in place.
    return_report : bool, default False
        Whether to return a :class:`Report` too. Its `refused` are subclasses of
        :class:`SyncBatchNorm` with code of their own, and layers with ``momentum=None``.

    Returns
    -------
    net : Block
        The same object. With `return_report`, (net, report).

    Raises
    ------
    ValueError
        For anything but a Block.
    MXNetError
        Of an earlier step that nobody has waited for. The net is then as it was before.
    """
    check_block(net, "revert_sync_batchnorm")
    found = list(walk(net))
    replaced, already, refused = [], [], []
    if any(isinstance(block, (SyncBatchNorm, SyncGraph)) for _, block in found):
        mx.nd.waitall()

    def revert(layer, path, name):
        before = _kind(layer)
        _make_stock(layer)
        replaced.append(Replaced(path, name, before, _kind(layer)))

    for path, block in found:
        if isinstance(block, SyncBatchNorm):
            why = _own_code(type(block), (SyncBatchNorm, SyncBatchNormReLU, VirtualBatchNorm))
            if block._kwargs["momentum"] is None:
                why = _CUMULATIVE
            if why:
                refused.append(Refused(path, block.name, _kind(block), why))
            else:
                revert(block, path, block.name)
        elif isinstance(block, _BatchNorm):
            already.append(path)
        elif isinstance(block, SymbolBlock):
            if isinstance(block, SyncGraph):
                for node in block._nodes:
                    if isinstance(node.layer, SyncBatchNorm):
                        revert(node.layer, f"{path}:{node.name}", node.name)
                        if node.operator in OUR_OPERATOR:
                            replaced.pop()  # It is in the graph below too.
                take_out(block)
            # Those that were in the graph when it was exported.
            nodes, left = read_graph(block, OUR_OPERATOR)
            refused += [Refused(f"{path}:{name}", name, *why) for name, *why in left]
            if nodes:
                inputs, graph = block._cached_graph
                block._cached_graph = inputs, spliced(graph, nodes)
                for node in {id(node.layer): node for node in reversed(nodes)}.values():
                    entry = f"{path}:{node.name}", node.name, node.operator, _kind(node.layer)
                    replaced.append(Replaced(*entry))
    if replaced:
        clear_caches(found)
    report = Report(tuple(replaced), tuple(already), tuple(refused))
    return _finish(net, "revert_sync_batchnorm", report, return_report)


def _make_synchronized(layer, template):
    settings = layer._kwargs
    added = tuple(name for name in vars(template) if name not in vars(layer))
    vars(layer).update({name: vars(template)[name] for name in added})
    layer._stock = type(layer), settings, added
    layer._kwargs = {name: settings.get(name, v) for name, v in template._kwargs.items()}
    layer.__class__ = SyncBatchNormReLU if layer.fuse_relu else SyncBatchNorm
    layer._meet()


def _make_stock(layer):
    kind, settings, added = vars(layer).pop("_stock", None) or _stock_of(layer)
    if "_layer" in vars(layer):
        layer._layer.leave()
    for name in added:
        vars(layer).pop(name, None)
    layer._kwargs = {name: layer._kwargs.get(name, value) for name, value in settings.items()}
    layer.__class__ = kind


def _stock_of(layer):
    """For a layer that was made as a synchronized one: class and settings, and what it has more."""
    plain = (nn.BatchNormReLU if layer.fuse_relu else nn.BatchNorm)(prefix="")
    return type(plain), plain._kwargs, _OWN_ATTRIBUTES


def _set(layer, values):
    vars(layer).update(values)
    layer._layer.join(layer._own_group, layer._num_devices)


def _why_not(layer, also, template):
    """Why a layer of MXNet's or of somebody else's cannot be replaced; None where it can."""
    kind = type(layer)
    why = _shadowed(layer)
    if why or kind in also:
        return why
    why = _own_code(kind, (nn.BatchNorm, nn.BatchNormReLU, ContribSyncBatchNorm, *also))
    unknown = set(layer._kwargs) - set(template._kwargs) - _IGNORED_SETTINGS
    if not why and unknown:
        why = f"it has settings that SyncBatchNorm has not: {', '.join(sorted(unknown))}."
    return why and f"{why} If nn.BatchNorm computes the same, give also=[{kind.__name__}]."


def _shadowed(layer):
    own = {"__call__", "forward", "hybrid_forward"} & set(vars(layer))
    return f"its {', '.join(sorted(own))} was replaced: delete that attribute." if own else None


def _own_code(kind, known):
    """What a class has that its base among `known` has not, where that may change the result."""
    usual = {base for stock in known for base in stock.__mro__}
    for base in kind.__mro__:
        own = set(vars(base)) - _HARMLESS
        if own and base not in usual and _full_name(base) not in _SAME_AS_STOCK:
            return f"{base.__name__} defines {', '.join(sorted(own))}."
    return None


def _full_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def _kind(layer):
    kind = type(layer)
    return f"contrib.{kind.__name__}" if kind is ContribSyncBatchNorm else kind.__name__


def _check_types(also):
    kinds = (also,) if isinstance(also, type) else also
    if isinstance(kinds, (list, tuple, set, frozenset)) and all(
        isinstance(kind, type) and issubclass(kind, _BatchNorm) for kind in kinds
    ):
        return tuple(kinds)
    raise ValueError(f"also is {also!r}: give a list of subclasses of mxnet.gluon.nn.BatchNorm.")


def _finish(net, function, report, return_report):
    title = f"{function}, {type(net).__name__} '{net.name}'"
    if report.replaced or report.already:
        _log.log(logging.WARNING if report.refused else logging.INFO, "%s: %s", title, report)
    elif report.refused or function == "convert_sync_batchnorm":
        _log.warning("%s: no batch normalization found to replace. %s", title, report)
    return (net, report) if return_report else net
