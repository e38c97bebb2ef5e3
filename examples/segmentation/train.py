"""Train a segmentation net with synchronized batch normalization; see README.md."""

import signal
import subprocess
import sys
from pathlib import Path

import workers
from console import reader_gone
from data import DataError
from options import UsageError, claimed, parse, prepare_environment


def main(argv=None):
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if workers.started():
            # Until all have met, a worker that were to end properly would wait for the others.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        options = parse(arguments, workers.started())
        # MXNet reads its settings when it is imported, which `settle` and `run` do.
        prepare_environment(options)
        workers.settle(options)
        with claimed(options):
            if options.workers > 1 and not workers.started():
                status = workers.launch(options, arguments)
            else:
                from run import run

                status = run(options)
        if status or workers.started() or options.no_export:
            return status
        # In a process of its own: it is of no training, and may need other settings of MXNet.
        script = Path(__file__).with_name("export.py")
        return subprocess.run([sys.executable, script, options.output]).returncode
    except (UsageError, DataError) as error:
        workers.let_the_first_speak()
        return f"{sys.argv[0]}: {error}"
    except BrokenPipeError:
        return reader_gone()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
