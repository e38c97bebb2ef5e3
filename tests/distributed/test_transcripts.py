"""The judge replays what happened to jobs. A transcript has an event a line:

processes 3, timeout 20          all have met, unless ", not met" follows, and report nothing
rank 1 in LAYER, call 3          it waits in this exchange, of all unless ", of 0-1" follows; it has
                                 arrived
rank 1 at train.py:30            it waits for nothing
rank 1 waits in asnumpy          for others, and half of that: "may wait in asnumpy"
rank 1 finished, failed: ERROR   its script has ended
rank 1 closes, connects          its connection
until 25: 0 1                    up to this second, these ranks report and the judge looks
-> 20.5 verdict: TEXT            what is decided then
"""

import re
from pathlib import Path

import pytest
from gluon_syncbn import durations
from gluon_syncbn.supervision._judge import Judge
from gluon_syncbn.supervision._records import FAILED, FINISHED, Exchange, Place, Report

FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
PERIOD = 0.5


class Replay:
    def __init__(self, size, timeout, not_met):
        self.size, self.timeout, self.now = size, timeout, 0.0
        self.judge = Judge(size, "the KVStore's server", timeout)
        if not not_met:
            self.judge.begin(0.0)
        # What each process does, since when, and the exchanges that it has reached.
        self.does = {rank: ("at", "train.py:1") for rank in range(size)}
        self.since = dict.fromkeys(range(size), 0.0)
        self.reached = {rank: set() for rank in range(size)}
        self.decided = []

    def note(self, decisions):
        texts = [f"-> {self.now:g} {kind}: {text}" for kind, text in decisions]
        self.decided += [text.rstrip(": ") for text in texts]

    def event(self, line):
        processes = re.fullmatch(r"rank (\d+) (.+)", line)
        if processes:
            return self.happens(int(processes[1]), processes[2])
        end, ranks = re.fullmatch(r"until ([\d.]+): ([\d ]+)", line).groups()
        while self.now < float(end):
            self.now += PERIOD
            for rank in map(int, ranks.split()):
                self.note(self.judge.report(rank, self.report(rank), self.now))
            self.note(self.judge.tick(self.now))

    def happens(self, rank, what):
        if what in ("closes", "connects"):
            if what == "closes":
                self.judge.disconnected(rank, self.now)
            else:
                self.judge.connected(rank)
            return
        kinds = r"(at|in|waits in|may wait in|finished|failed:) ?(.*)"
        self.does[rank] = re.match(kinds, what).groups()
        self.since[rank] = self.now
        if self.does[rank][0] == "in":
            self.reached[rank].add(what[3:])

    def report(self, rank):
        does, text = self.does[rank]
        seconds = self.now - self.since[rank]
        exchanges, place, status = [], None, None
        if does == "in":
            title, first, last = re.fullmatch(r"(.+), call \d+(?:, of (\d+)-(\d+))?", text).groups()
            ranks = (int(first), int(last) + 1) if first else (0, self.size)
            exchanges = [Exchange(text, title, seconds, self.timeout, *ranks, True)]
        elif does == "at":
            place = Place(text, seconds)
        elif does.endswith("wait in") or does == "waits in":
            share = durations.DOUBT if does.startswith("may") else 1
            place = Place(text, seconds, seconds, share * seconds)
        else:
            status = (FAILED, text) if does == "failed:" else (FINISHED, "")
        reached = {name: name in self.reached[rank] for name in self.judge.asked}
        return Report(exchanges, reached, None, place, status)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_transcript(file):
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    head = re.fullmatch(r"processes (\d+), timeout (\d+)(, not met)?", lines[0])
    replay = Replay(int(head[1]), int(head[2]), head[3])
    for line in lines[1:]:
        if not line.startswith("->"):
            replay.event(line)
    assert replay.decided == [line for line in lines if line.startswith("->")]
