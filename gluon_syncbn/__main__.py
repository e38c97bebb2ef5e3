"""The command line: gluon-syncbn, or python -m gluon_syncbn.

launch    the processes of a distributed training; also python -m gluon_syncbn.launch
export    a checkpoint to stock MXNet and ONNX, folded or not
convert   a symbol to stock operators
doctor    versions, devices, native parts and a test of two devices, with remedies

Each command has --help, and imports only what it needs.
"""

import argparse
import os
import re
import signal
import sys

from ._version import __version__

_DTYPES = ("float16", "float32", "float64")
_FORMATTER = argparse.RawDescriptionHelpFormatter
_SOURCE = """\
SOURCE is a NAME-symbol.json of net.export or a Module, or the NAME alone, with the parameters of
the last epoch, such as NAME-0012.params, of --epoch, or of --params."""


def main(arguments=None):
    """Runs the command line. Returns the exit code."""
    is_program = arguments is None
    arguments = sys.argv[1:] if is_program else arguments
    if arguments[:1] == ["launch"]:
        from mxnet_launch.__main__ import main as launch

        return launch(arguments[1:])
    if is_program:
        # Like other programs, end silently when the reader stops: `... | head`.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if arguments[:1] != ["doctor"]:
            # With the role of a server, `import mxnet` would not return.
            os.environ.pop("DMLC_ROLE", None)
    parser = _parser()
    options = parser.parse_args(arguments or ["--help"])

    def fail(text):
        parser.exit(2, f"{parser.prog} {options.command}: error: {text}\n")

    try:
        return _run(options, fail)
    except KeyboardInterrupt:
        parser.exit(130, "Interrupted.\n")


def _run(options, fail):
    if options.command == "doctor":
        from .cli import doctor

        if options.mxnet_on_import is not None:
            return doctor.switch(options.mxnet_on_import, fail)
        return doctor.doctor()
    try:
        from . import _public  # noqa: F401  It explains what is wrong with MXNet.
        from .cli import checkpoints
    except ImportError as error:
        fail(error)
    try:
        return getattr(checkpoints, options.command)(options)
    except UnicodeEncodeError as error:
        fail(
            f"{error.object!r} is not a UTF-8 name, which MXNet requires: rename the file or "
            "choose another name."
        )
    except checkpoints.ERRORS as error:
        fail(error)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser():
    parser = _Parser(prog="python -m gluon_syncbn", description=__doc__, formatter_class=_FORMATTER)
    parser.add_argument("--version", action="version", version=f"gluon_syncbn {__version__}")
    choices = "launch|export|convert|doctor"
    commands = parser.add_subparsers(dest="command", required=True, metavar=choices)

    def add(name, description):
        return commands.add_parser(name, description=description, formatter_class=_FORMATTER)

    add("launch", "See python -m gluon_syncbn launch --help.")  # For messages: main() runs it.
    _add_export(add("export", f"Write a checkpoint for stock MXNet and ONNX Runtime.\n\n{_SOURCE}"))
    convert = add(
        "convert",
        "Convert a symbol: each kind of batch normalization becomes the stock operator BatchNorm. "
        "With\n--epoch, a checkpoint: also the parameters of that epoch.",
    )
    file = "a -symbol.json file; with --epoch, its NAME is enough"
    convert.add_argument("file", metavar="FILE", help=file)
    output = "may be FILE itself; with --epoch, the NAME of both files"
    convert.add_argument("-o", "--output", required=True, metavar="FILE", help=output)
    _add_epoch(convert)

    doctor = add("doctor", "Report what is installed, what works, and how to fix what does not.")
    switch = doctor.add_mutually_exclusive_group()
    switch.add_argument(
        "--enable-mxnet-on-import",
        dest="mxnet_on_import",
        action="store_true",
        default=None,
        help="with Python 3.12 or NumPy 1.24 and newer: let programs import mxnet without "
        "gluon_syncbn, by a .pth file in this environment",
    )
    switch.add_argument(
        "--disable-mxnet-on-import",
        dest="mxnet_on_import",
        action="store_false",
        default=None,
        help="remove that file",
    )
    return parser


def _add_export(parser):
    add = parser.add_argument
    add("source", metavar="SOURCE")
    parameters = parser.add_mutually_exclusive_group()
    parameters.add_argument("--params", metavar="FILE", help="the parameters")
    _add_epoch(parameters)
    inputs = "the symbol's inputs, separated by commas (data, data0, ...)"
    add("--inputs", metavar="NAMES", help=inputs)
    files = "of NAME-symbol.json and NAME-0000.params; with --epoch, the number is the epoch's"
    add("-o", "--output", required=True, metavar="NAME", help=files)
    add("--fold", action="store_true", help="fold batch normalization into the layers before it")
    add("--onnx", metavar="FILE", help="write an ONNX model too")
    add("--any-batch", action="store_true", help="let the ONNX model take any batch size")
    shape = "shape of the input, for the comparison and --onnx; repeat for each input"
    add("--input-shape", type=_shape, action="append", metavar="N,C,H,W", help=shape)
    add("--dtype", choices=_DTYPES, help="convert the parameters")


def _add_epoch(parser):
    parser.add_argument("--epoch", type=_epoch, metavar="N", help="the parameters of this epoch")


def _epoch(text):
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an epoch: give an integer from 0")
    return int(text)


def _shape(text):
    try:
        shape = tuple(int(part) for part in text.strip("()").split(",") if part.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape: give positive integers with commas, such as 1,3,224,224"
        )
    return shape


if __name__ == "__main__":
    sys.exit(main())
