import textwrap

import pytest
from launched import ALONE, Launcher


@pytest.fixture
def start(tmp_path):
    launchers = []

    def start(script, *options, arguments=(), **environment):
        path = tmp_path / f"script{len(launchers)}.py"
        path.write_text(textwrap.dedent(script))
        launchers.append(Launcher([*options, str(path), *arguments], tmp_path, environment))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.clean()


@pytest.fixture
def alone(start):
    return lambda script, *options: start(script, "--from-env", *options, **ALONE)
