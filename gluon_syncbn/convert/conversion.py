"""Makes the batch normalization of an existing net synchronized, or stock again."""

from __future__ import annotations

import logging
import sys
from typing import Any, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block, SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from ..graph.blocks import BATCH_NORMS, check_block, clear_caches, compile_again, walk
from ..graph.fusion import is_fusing, stop_fusing
from ..graph.symbol_block import SyncGraph, put_in, read_graph, spliced, take_out
from ..graph.symbols import OUR_OPERATOR, STOCK_OPERATORS
from ..groups.group import SyncGroup, is_first_process
from ..layers.batch_norm import SyncBatchNorm, SyncBatchNormReLU
from ..layers.virtual import VirtualBatchNorm
from ._classes import make_stock, make_synchronized, own_code
from ._fusing import fuse_blocks
from ._report import Entry, Report
from ._symbolic import convert_symbol, revert_symbol

_log = logging.getLogger("gluon_syncbn")

# Settings that do not change the result, and those of contrib for its own synchronization.
_IGNORED_SETTINGS = {"cudnn_off", "ndev", "key"}

_CUMULATIVE = "it has momentum=None, and nn.BatchNorm has no cumulative average."
_LEAKY = "it has activation='leaky_relu', which no layer of MXNet has."
_VIRTUAL = "its devices do not synchronize, by design"


def convert_sync_batchnorm(
    net: Block | mx.sym.Symbol,
    group: SyncGroup | None = None,
    num_devices: int | None = None,
    also: type | Collection[type] = (),
    return_report: bool = False,
    fuse: bool = False,
) -> Any:
    """Makes the batch normalization of an existing net synchronized.

    ``nn.BatchNorm``, ``nn.BatchNormReLU``, the contrib ``SyncBatchNorm`` and subclasses that only
    set arguments become :class:`SyncBatchNorm` or :class:`SyncBatchNormReLU`, wherever they are in
    the net: children, attributes, lists, tuples, sets and dicts of blocks, and the graph of a
    SymbolBlock, such as an imported file or the features of gluoncv's SSD and FPN detectors.

    A layer stays the same object and changes its class. It keeps its Parameter objects (with
    values, initialization, contexts, grad_req, lr_mult, sharing), name, settings and hooks, so
    existing references stay valid, such as a Trainer's, and parameter files fit the net before and
    after. What ``hybridize()`` has compiled is compiled again, blocks around the net too.

    Prints the number of replaced layers to stderr, unless `return_report` is set. The logger
    ``gluon_syncbn`` warns of layers that were not replaced, and if there is nothing to replace.

    It does not find layers that only a function or an object other than a Block refers to, or
    blocks that call ``F.BatchNorm`` themselves. A layer that `net` shares with another net is
    synchronized there too.

    Of a Symbol it returns a new one, with the same names of arguments, auxiliary states and
    outputs, so checkpoints fit both. Each Module that is bound for training with it, also one of
    ``Module.load`` or a BucketingModule, has layers of its own, which synchronize its contexts, and
    other processes as :func:`set_default_group` says.

    Parameters
    ----------
    net : Block or Symbol
        A Block, initialized or not, hybridized or not, on any contexts, is changed in place.
    group : SyncGroup, optional
        The devices and processes that take part, as for :class:`SyncBatchNorm`. Layers that are
        already synchronized adopt it.
    num_devices : int, optional
        The number of devices, as for :class:`SyncBatchNorm`. By default all devices of the
        parameters; a contrib layer's number is ignored.
    also : type or sequence of types, default ()
        Subclasses of ``nn.BatchNorm`` to replace even though they have their own code, which is
        then no longer called.
    return_report : bool, default False
        Whether to return a :class:`~gluon_syncbn.convert.Report` too.
    fuse : bool, default False
        Whether to fuse the relu, leaky relu or addition that follows a normalization into it, and
        with an addition also the activation after it. That saves passes over the data and the
        arrays in between. It happens in the graphs that ``hybridize()`` compiles and in
        SymbolBlocks, where nothing else uses the normalization's output. A net that is not
        hybridized computes as before. Results are bit-identical to those of the unfused net that is
        hybridized too, with the exceptions that :class:`SyncBatchNorm` lists for `activation`, such
        as a leaky relu of 16-bit data. (Without ``hybridize()``, the running statistics of a layer
        that is called several times may differ: MXNet runs a graph in another order.) An addition
        is not fused if that would change the order of calls of one layer, of random operators or of
        third-party custom operators, or the order in which more than two gradients are added. (Only
        where ``BlockGrad`` stops a branch, or MXNet merges equal nodes, may dx differ in its last
        bits.)
        A later call without `fuse` does not undo fusion.

    Returns
    -------
    net : Block or Symbol
        The same Block, or a new Symbol. With `return_report`, (net, report).

    Raises
    ------
    TypeError
        If `net` is neither, or an argument is of another type. The net is unchanged.
    ValueError
        If an argument is invalid, such as `group` for a Symbol. The net is unchanged.

    References
    ----------
    PyTorch's ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` does this for its modules.
    """
    if isinstance(net, mx.sym.Symbol):
        others = {"group": group, "num_devices": num_devices, "also": also}
        given = [f"{name}={value!r}" for name, value in others.items() if value not in (None, ())]
        if given:
            raise ValueError(
                f"convert_sync_batchnorm got a Symbol and {', '.join(given)}: leave it out. The "
                "contexts of the Module take part, and with other processes those of "
                "gluon_syncbn.set_default_group."
            )
        return _finish(*convert_symbol(net, fuse), (), "convert_sync_batchnorm", return_report)
    check_block(net, "convert_sync_batchnorm")
    also = _check_types(also)
    # Checks the arguments, and has everything that a layer will get.
    template = SyncBatchNorm(prefix="", num_devices=num_devices, group=group)
    template._layer.leave(template)
    adopted: dict[str, Any] = {} if group is None else {"_own_group": template._own_group}
    if num_devices is not None:
        adopted["_num_devices"] = template._num_devices
    found = list(walk(net))
    conversion = _Conversion(template, adopted, also)
    for path, block in found:
        conversion.convert(path, block)
    fused, not_fused = fuse_blocks(found) if fuse else ([], [])
    report = conversion.report()._replace(fused=tuple(fused), not_fused=tuple(not_fused))
    return _finish(net, report, found, "convert_sync_batchnorm", return_report)


class _Conversion:
    """What has been done so far.

    template: a SyncBatchNorm with everything that a layer will get. adopted: the attributes that a
    synchronized layer adopts. also: further classes to replace.
    """

    def __init__(
        self, template: SyncBatchNorm, adopted: Mapping[str, Any], also: tuple[type, ...]
    ) -> None:
        self._template, self._adopted, self._also = template, adopted, also
        self._replaced: list[Entry] = []
        self._already: list[str] = []
        self._refused: list[Entry] = []

    def report(self) -> Report:
        return Report(tuple(self._replaced), tuple(self._already), tuple(self._refused))

    def convert(self, path: str, block: Block) -> None:
        why = None
        if isinstance(block, VirtualBatchNorm):
            why = f"{_VIRTUAL}: revert it first."
        elif isinstance(block, SyncBatchNorm):
            self._adopt(path, block)
        elif isinstance(block, BATCH_NORMS):
            why = _why_not(block, self._also, self._template)
            if not why:
                self._synchronize(path, block, block.name, _kind(block))
        elif isinstance(block, SyncGraph):
            for node in block._nodes:
                self._adopt(f"{path}:{node.name}", node.layer)
        elif isinstance(block, SymbolBlock):
            self._convert_graph(path, block)
        if why:
            self._refused.append(Entry(block.name, path, _kind(block), why=why))

    def _synchronize(self, path: str, layer: nn.BatchNorm, name: str, before: str) -> None:
        make_synchronized(layer, self._template)
        self._replaced.append(Entry(name, path, before, _kind(layer)))

    def _adopt(self, path: str, layer: SyncBatchNorm) -> None:
        self._already.append(path)
        if self._adopted:
            layer.__dict__.update(self._adopted)
            layer._layer.join(layer._own_group, layer._num_devices)

    def _convert_graph(self, path: str, block: SymbolBlock) -> None:
        nodes, left = read_graph(block, {**STOCK_OPERATORS, **OUR_OPERATOR})
        virtual = [node for node in nodes if node.settings.virtual_devices]
        nodes = [node for node in nodes if not node.settings.virtual_devices]
        left += [(node.name, node.operator, f"{_VIRTUAL}.") for node in virtual]
        self._refused += _left_in_graph(path, left)
        for node in nodes:
            layer = node.layer
            if not isinstance(layer, SyncBatchNorm):
                self._synchronize(f"{path}:{node.name}", layer, node.name, node.operator)
                unbiased = node.settings.unbiased
                layer._own_settings = {**layer._own_settings, "unbiased": unbiased}
        if nodes:
            put_in(block, nodes)


# Where users of PyTorch look for it.
SyncBatchNorm.convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)


def revert_sync_batchnorm(net: Block | mx.sym.Symbol, return_report: bool = False) -> Any:
    """Undoes :func:`convert_sync_batchnorm`.

    A replaced layer gets its former class back. A layer that was made as :class:`SyncBatchNorm`
    becomes ``nn.BatchNorm`` or ``nn.BatchNormReLU``, also in a graph that was exported from a
    synchronized net. Fusion ends, and nothing of this package remains in the net.

    Settings that nn.BatchNorm lacks are lost: it computes a biased running variance on the CPU and
    an unbiased one with cuDNN, and has no virtual devices. MXNet runs ``nn.BatchNormReLU`` on the
    CPU only. A block that calls a layer with a residual gets a TypeError from nn.BatchNorm.

    A layer stays the same object, with its Parameter objects, hooks and settings, including
    settings changed in the meantime. The function waits for all pending work of MXNet, because the
    last steps may still exchange statistics with other processes.

    Of a Symbol it returns a new one, which MXNet without this package runs.

    Parameters
    ----------
    net : Block or Symbol
        A Block is changed in place.
    return_report : bool, default False
        Whether to return a :class:`~gluon_syncbn.convert.Report` too. Its `refused`
        are subclasses of :class:`SyncBatchNorm` with their own code, and layers with
        ``momentum=None`` or ``activation="leaky_relu"``.

    Returns
    -------
    net : Block or Symbol
        The same Block, or a new Symbol. With `return_report`, (net, report).

    Raises
    ------
    TypeError
        If `net` is neither.
    ExportError
        If a node of a Symbol has ``inplace=True``, or its mean or variance is used.
    MXNetError
        An error of an earlier step, raised here because this function waits for it. The net is
        unchanged.
    """
    if isinstance(net, mx.sym.Symbol):
        return _finish(*revert_symbol(net), (), "revert_sync_batchnorm", return_report)
    check_block(net, "revert_sync_batchnorm")
    found = list(walk(net))
    replaced: list[Entry] = []
    already: list[str] = []
    refused: list[Entry] = []
    if any(isinstance(block, (SyncBatchNorm, SyncGraph)) for _, block in found):
        mx.nd.waitall()
    fusing = [block for _, block in found if is_fusing(block)]
    for block in fusing:
        stop_fusing(block)
    if fusing:
        clear_caches(found)

    for path, block in found:
        if isinstance(block, SyncBatchNorm):
            why = _why_not_stock(block)
            if why:
                refused.append(Entry(block.name, path, _kind(block), why=why))
            else:
                replaced.append(_reverted(path, block, block.name))
        elif isinstance(block, BATCH_NORMS):
            already.append(path)
        elif isinstance(block, SymbolBlock):
            done, left = _revert_graph(path, block)
            replaced += done
            refused += left
    report = Report(tuple(replaced), tuple(already), tuple(refused))
    return _finish(net, report, found, "revert_sync_batchnorm", return_report)


def _why_not_stock(layer: SyncBatchNorm) -> str | None:
    activation = layer._own_settings["activation"]
    if layer._kwargs["momentum"] is None:
        return _CUMULATIVE
    if activation == "leaky_relu":
        return _LEAKY
    if activation and len(BATCH_NORMS) == 1:
        return f"MXNet {mx.__version__} has no nn.BatchNormReLU."
    return own_code(type(layer), (SyncBatchNorm, SyncBatchNormReLU, VirtualBatchNorm))


def _reverted(path: str, layer: SyncBatchNorm, name: str) -> Entry:
    before = _kind(layer)
    make_stock(layer)
    return Entry(name, path, before, _kind(layer))


def _revert_graph(path: str, block: SymbolBlock) -> tuple[list[Entry], list[Entry]]:
    """Returns entries of what was replaced, and of what was not."""
    replaced = []
    for node in block._nodes if isinstance(block, SyncGraph) else ():
        if isinstance(node.layer, SyncBatchNorm):
            entry = _reverted(f"{path}:{node.name}", node.layer, node.name)
            # Nodes of our operator are among those that are read below.
            if node.operator not in OUR_OPERATOR:
                replaced.append(entry)
    take_out(block)
    # Layers of ours that were in the graph when it was exported.
    nodes, left = read_graph(block, OUR_OPERATOR)
    if nodes:
        inputs, graph = block._cached_graph
        block._cached_graph = inputs, spliced(graph, nodes)
    for node in {id(node.layer): node for node in reversed(nodes)}.values():
        entry = Entry(node.name, f"{path}:{node.name}", node.operator, _kind(node.layer))
        replaced.append(entry)
    return replaced, _left_in_graph(path, left)


def _left_in_graph(path: str, left: Sequence[tuple[str, str, str]]) -> list[Entry]:
    return [Entry(name, f"{path}:{name}", kind, why=why) for name, kind, why in left]


def _why_not(layer: nn.BatchNorm, also: tuple[type, ...], template: SyncBatchNorm) -> str | None:
    """Why a layer of MXNet or a third party cannot be replaced, or None."""
    kind = type(layer)
    shadowed = {"__call__", "forward", "hybrid_forward"} & set(vars(layer))
    if shadowed:
        return f"its {', '.join(sorted(shadowed))} was replaced: delete that attribute."
    if kind in also:
        return None
    why = own_code(kind, (*BATCH_NORMS, ContribSyncBatchNorm, *also))
    unknown = set(layer._kwargs) - set(template._kwargs) - _IGNORED_SETTINGS
    if not why and unknown:
        why = f"it has settings that SyncBatchNorm lacks: {', '.join(sorted(unknown))}."
    return why and f"{why} If nn.BatchNorm computes the same, give also=[{kind.__name__}]."


def _kind(layer: nn.BatchNorm) -> str:
    kind = type(layer)
    return f"contrib.{kind.__name__}" if kind is ContribSyncBatchNorm else kind.__name__


def _check_types(also: type | Collection[type]) -> tuple[type, ...]:
    kinds = (also,) if isinstance(also, type) else also
    if isinstance(kinds, (list, tuple, set, frozenset)) and all(
        isinstance(kind, type) and issubclass(kind, BATCH_NORMS) for kind in kinds
    ):
        return tuple(kinds)
    raise TypeError(f"also is {also!r}: give a list of subclasses of mxnet.gluon.nn.BatchNorm.")


def _finish(
    net: Block | mx.sym.Symbol,
    report: Report,
    found: Sequence[tuple[str, Block]],
    function: str,
    return_report: bool,
) -> Any:
    if found and report.replaced:
        compile_again(found)
    result = (net, report) if return_report else net
    if not is_first_process():
        return result
    title = f"{function}, {type(net).__name__} '{net.name}'"
    if report.replaced or report.already:
        if report.refused:
            _log.warning("%s: %s", title, report)
        elif not return_report:
            print(f"{title}: {report}", file=sys.stderr)
    elif report.refused or function == "convert_sync_batchnorm":
        _log.warning("%s: no batch normalization found to replace. %s", title, report)
    return result
