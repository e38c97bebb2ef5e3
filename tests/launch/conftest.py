import itertools
import textwrap

import pytest
from launched import Launcher, alone_here


@pytest.fixture
def command(tmp_path):
    """Starts a launcher with these arguments, in the test's folder."""
    launchers = []

    def command(*arguments, **environment):
        launchers.append(Launcher(arguments, tmp_path, environment))
        return launchers[-1]

    yield command
    for launcher in launchers:
        launcher.clean()


@pytest.fixture
def start(tmp_path, command):
    numbers = itertools.count()

    def start(script, *options, **environment):
        path = tmp_path / f"script{next(numbers)}.py"
        path.write_text(textwrap.dedent(script))
        return command(*options, str(path), **environment)

    return start


@pytest.fixture
def alone(start):
    return lambda script, *options: start(script, "--from-env", *options, **alone_here())
