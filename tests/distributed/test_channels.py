"""Messages of layers through native channels: when they bypass Python, and when they go back."""


def test_python_has_no_part_in_what_all_processes_know(pair):
    for told in pair.told("through python"):
        keys = [f"{told['number']} {name}" for name in ("forward -1", "backward -1")]
        assert told["first"] == [f"{told['number']} handshake", *keys]
        assert told["steps"] == []
        # A layer that has other devices is known by now.
        assert told["moved"] == keys
        assert [told["first mean"], *told["means"], told["moved mean"]] == [0.5] * 5


def test_passes_without_backward_take_no_new_keys(pair):
    for number, counts in pair.told("passes"):
        assert counts == {
            f"{number} handshake": 1,
            f"{number} forward -1": 11,
            f"{number} backward -1": 1,
        }


def test_a_layer_takes_the_store_of_its_group(pair):
    for told in pair.told("another store"):
        # The handshake, and two messages in each of two steps.
        assert told["reducer"] == [5, 0]
        assert told["files"] == [0, 5]
        assert told["again"] == [4, 0]
        assert told["means"] == [0.5] * 6


def test_a_group_that_failed_stays_so(pair):
    for told in pair.told("failed"):
        kind, text, _ = told["failed"]
        assert kind == "MXNetError"
        assert "the processes have lost each other" in text and "a device was lost" in text
        assert told["other"] == [0.5, 0.5]


def test_a_probe_shows_who_has_arrived(pair):
    _, told = pair.told("probed")
    assert told["second"] == told["met"] == "arrived"
    assert told["next"] == told["next after"] == "absent"
    assert told["waits"] == ["arrived", "a title (probed 3)", "a title (probed 2)"]
