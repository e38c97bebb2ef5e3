"""Random faults at random moments; `make chaos` has more of them."""

import chaos
import pytest


@pytest.mark.long
def test_twenty_random_faults(capsys):
    assert chaos.main(["--faults", "20", "--seed", "1"]) == 0, capsys.readouterr().out
