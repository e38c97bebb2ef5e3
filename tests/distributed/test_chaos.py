"""Random faults at random moments; `make chaos` has more of them."""

import chaos
import pytest


@pytest.mark.slow
@pytest.mark.long
def test_random_faults(monkeypatch, capsys):
    # The machine has other tests to run, and may stand still for some seconds.
    monkeypatch.setattr(chaos, "TIMEOUT", 10.0)
    monkeypatch.setattr(chaos, "SLACK", 20.0)
    assert chaos.main(["--faults", "12", "--seed", "1"]) == 0, capsys.readouterr().out
