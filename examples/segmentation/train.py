"""Train a segmentation net with synchronized batch normalization; see README.md."""

import sys

from data import DataError
from options import UsageError, parse, prepare_environment


def main(argv=None):
    try:
        options = parse(argv)
        # MXNet reads its settings when it is imported, which `run` does.
        prepare_environment(options)
        from run import run

        return run(options)
    except (UsageError, DataError) as error:
        return f"{sys.argv[0]}: {error}"
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
