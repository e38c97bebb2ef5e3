"""The judge, in simulated time: random histories of processes that arrive, leave, stop, go on, fail
and finish. And its texts."""

import collections
import json
import os
import random
import re

import pytest
from gluon_syncbn.supervision._judge import END, VERDICT, WARNING, Judge
from gluon_syncbn.supervision._records import (
    FAILED,
    FINISHED,
    Exchange,
    Place,
    Report,
    reasons,
)

CASES, SEED = (int(os.environ.get(*each)) for each in (("CASES", 3000), ("SEED", 0)))
# Seconds: the shortest timeout, between two reports, and what a decision may come later.
T, PERIOD, LATE = 20.0, 1.0, 4.0
NEVER = 1e9
# What ends a job, and what messages then say of the process.
FAULTS = {
    "killed": "process ended",
    "stopped": "no answer: stopped",
    "cut off": "no answer: stopped",
    "loops": r"is at loop\.py:1 for",
    "fails": "failed: a bad batch",
    "finishes early": "reached the end of the script",
    "loses an answer": "waiting in Layer",
}
# What does not.
EVENTS = ["none", "stop", "suspension", "cut", "reset", "validation", "evaluation"]
# Where all exchanges have more time: one that only they allow.
LONG = "long validation"


class Process:
    """Walks through the steps of its script: exchanges of layers, or (a str) MXNet's own."""

    def __init__(self, rank, script):
        self.rank, self.script = rank, script
        # The step, whether it has begun, and until when the process computes before it.
        self.step, self.waits, self.computes_until = 0, False, 0.0
        self.stopped_until = self.cut_until = 0.0
        # The time for which it was not stopped, and when exchanges began, and MXNet's wait.
        self.clock, self.looked, self.begun = 0.0, 0.0, {}
        self.completed = collections.deque(maxlen=16)
        self.place, self.status, self.asked = "train.py:30", None, ()
        # When it began to wait for MXNet, which may compute, if it does.
        self.queued_at = None

    def runs(self, now):
        return now >= self.stopped_until

    def next(self):
        """One of the next exchanges; None where the script has ended."""
        return self.script[self.step][0] if self.step < len(self.script) else None

    def here(self):
        """The exchanges that it waits in."""
        if not self.waits or self.status:
            return []
        return [each for each in self.script[self.step] if name_of(each) not in self.completed]

    def own_place(self):
        waited = None if self.queued_at is None else self.clock - self.queued_at
        return Place(self.place, 0.0, waited, (waited or 0.0) / 10)

    def report(self, now):
        self.clock += min(now - self.looked, 3.0)
        self.looked = now
        here = self.here()
        self.begun = {name_of(e): self.begun.get(name_of(e), self.clock) for e in here}
        waited = {name: self.clock - begun for name, begun in self.begun.items()}
        in_mxnet = any(isinstance(each, str) for each in here)
        return Report(
            [] if in_mxnet else [each._replace(waited=waited[each.name]) for each in here],
            {name: name in waited or name in self.completed for name in self.asked},
            self.completed[-1] if self.completed else None,
            Place("pull, called at train.py:7", 0.0, waited[here[0]], waited[here[0]])
            if in_mxnet
            else self.own_place(),
            self.status,
        )


def name_of(step):
    return step if isinstance(step, str) else step.name


def scripts(chance, size, timeouts):
    """Of each process: calls of some layers, some of them for groups of processes."""
    layers = range(chance.randint(1, 3))
    groups = [chance.choice([g for g in range(2, size + 1) if size % g == 0]) for _ in layers]
    limits = [chance.choice(timeouts) for _ in layers]
    calls = range(1, chance.randint(2, 4))
    branches, steps = chance.random() < 0.5, [chance.random() < 0.5 for _ in calls]

    def script(rank):
        def exchange(layer, key, group, number=1):
            name, title = f"{layer} {key} {group} {number}", f"Layer {layer}, {key} {number}"
            first = rank // group * group
            return Exchange(name, title, 0.0, limits[layer], first, first + group)

        found = [[exchange(layer, "handshake", size)] for layer in layers]
        for call in calls:
            forward = [exchange(layer, "forward -1", groups[layer], call) for layer in layers]
            found += [forward] if branches else [[each] for each in forward]
            found += [[f"step {call}"]] if steps[call - 1] else []
        return found

    return [script(rank) for rank in range(size)]


class History:
    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        size = self.size = chance.randint(2, 6)
        timeouts = chance.choice([[T], [T, 2 * T], [T, 3 * T], [3 * T]])
        self.longest = max(timeouts)
        self.fault = chance.choice([None, None, *FAULTS])
        found = scripts(chance, size, timeouts)
        self.processes = [Process(*each) for each in enumerate(found)]
        # Rank 0's own death is no matter of the judge.
        self.culprit = chance.randrange(self.fault in ("killed", "stopped", "cut off"), size)
        self.fault_at = chance.uniform(0, 0.1 * T * len(found[0]))
        events = [*EVENTS, LONG] if min(timeouts) > T else EVENTS
        self.event, self.event_at = chance.choice(events), chance.uniform(0, T * len(found[0]) / 20)
        self.victim = chance.choice([r for r in range(size) if r != self.culprit])
        # When they happened: in the judge's time, and in real time.
        self.struck = self.happened = None
        # What the event adds to limits, and whom it touches.
        self.slack, self.touched = 0.0, set()
        self.judge = Judge(size, "the store", T)
        # Until when an exchange with a longer timeout may still be known.
        self.long_until = 0.0
        self.now = self.time = self.looked = 0.0
        self.mail = [collections.deque() for _ in range(size)]
        self.arrived, self.lost_answer = collections.Counter(), None
        self.decisions = []

    def strike(self, process):
        """Returns whether the fault has happened."""
        if process.status or self.now < self.fault_at:
            return False
        if self.fault == "killed":
            process.stopped_until = NEVER
            self.judge.disconnected(process.rank, self.time)
        elif self.fault == "stopped":
            process.stopped_until = NEVER
        elif self.fault == "cut off":
            process.cut_until = NEVER
        elif self.fault == "loses an answer":
            here = process.here()
            if not here or isinstance(here[0], str):
                return False
            self.lost_answer = here[0].name
        elif process.waits:
            return False
        elif self.fault == "loops":
            process.place, process.computes_until = "loop.py:1", NEVER
        elif self.fault == "fails":
            process.status = FAILED, "a bad batch"
        else:
            process.status = FINISHED, ""
        return True

    def happen(self, process):
        """Returns whether the harmless event has happened."""
        if self.now < self.event_at:
            return False
        everyone = range(self.size)
        if self.event == LONG:
            if process.waits or isinstance(process.next(), (str, type(None))):
                return False
            process.place, process.computes_until = "validate.py:3", self.now + 2 * T
            self.touched = {process.rank}
        elif self.event in ("validation", "evaluation"):
            has_ended = process.step == len(process.script)
            if process.waits or process.status or (self.event == "evaluation") != has_ended:
                return False
            process.place = "validate.py:3"
            process.computes_until = self.now + (3 * self.longest if has_ended else 0.8 * T)
            process.queued_at = self.chance.choice([None, process.clock])
            self.touched = {process.rank}
        elif self.event == "stop":
            self.slack, process.stopped_until = 0.7 * T, self.now + 0.7 * T
            # The judge may have stood still.
            self.touched = {process.rank} if process.rank else set(everyone)
        elif self.event == "suspension":
            for each in self.processes:
                each.stopped_until = max(each.stopped_until, self.now + 3 * self.longest)
                each.computes_until += 3 * self.longest
            self.slack, self.touched = 3.0, set(everyone)
        elif self.event == "cut":
            self.slack = self.chance.uniform(1, 0.8 * T)
            process.cut_until, self.touched = self.now + self.slack, {process.rank}
        elif self.event == "reset" and process.rank:
            self.judge.disconnected(process.rank, self.time)
            self.touched = {process.rank}
        return True

    def advance(self, process):
        if process.status:
            return
        if not process.waits and self.now >= process.computes_until:
            if process.step == len(process.script):
                process.status, process.queued_at = (FINISHED, ""), None
                return
            process.waits, process.queued_at = True, None
            self.arrived.update(map(key_of, process.here()))
        for each in process.here():
            members = self.size if isinstance(each, str) else len(each.members)
            is_lost = process.rank == self.culprit and name_of(each) == self.lost_answer
            if self.arrived[key_of(each)] == members and not is_lost:
                process.completed.append(name_of(each))
        if process.waits and not process.here():
            process.step, process.waits = process.step + 1, False
            process.computes_until = self.now + self.chance.uniform(0, 0.04 * T)

    def judge_all(self):
        self.time += min(self.now - self.looked, 3.0)
        self.looked = self.now
        for rank in self.chance.sample(range(self.size), self.size):
            while self.mail[rank] and self.mail[rank][0][0] <= self.now:
                self.decisions += self.judge.report(rank, self.mail[rank].popleft()[1], self.time)
        ticked = self.judge.tick(self.time)
        self.decisions += ticked
        for process in self.processes:
            if process.runs(self.now) and self.now >= process.cut_until:
                process.asked = self.judge.asked
        assert sum(decision.kind == WARNING for decision in ticked) <= 1

    def run(self):
        self.judge.begin(0.0)
        while not self.judge.decided:
            self.now += PERIOD
            if self.fault and self.struck is None and self.strike(self.processes[self.culprit]):
                self.struck = self.time
            if self.happened is None and self.happen(self.processes[self.victim]):
                self.happened = self.now
            elif self.event == "reset" and self.happened == self.now - PERIOD:
                self.judge.connected(self.victim)
            for process in self.chance.sample(self.processes, self.size):
                if process.runs(self.now):
                    self.advance(process)
                    report = process.report(self.now)
                    if self.now >= process.cut_until:
                        delay = self.chance.choice([0, 0, 0, 1, 2]) if process.rank else 0
                        self.mail[process.rank].append((self.now + delay, report))
            if self.processes[0].runs(self.now):
                self.judge_all()
                self.nobody_waits_too_long()
            assert self.now < 15 * self.longest, "the job neither ends nor goes on"
        self.check()

    # The properties.

    def nobody_waits_too_long(self):
        here = [each for process in self.processes for each in process.here()]
        if any(not isinstance(each, str) and each.timeout > T for each in here):
            self.long_until = self.now + 2 * LATE
        longest = self.longest if self.now <= self.long_until else T
        for process in self.processes:
            if self.judge.decided or not process.runs(self.now) or self.now < process.cut_until:
                continue
            report = process.report(self.now)
            for exchange in report.exchanges:
                assert exchange.waited <= 1.1 * exchange.timeout + LATE + self.slack, exchange
            assert report.place.counted <= longest + LATE + self.slack, report.place

    def check(self):
        decision = self.judge.decided
        for process in self.processes:
            assert not self.judge.report(process.rank, process.report(self.now), self.time)
        assert not self.judge.tick(self.time + 100 * T), "something follows"
        assert [each for each in self.decisions if each.kind != WARNING] == [decision]
        if decision.kind == END:
            assert all(each.status == (FINISHED, "") for each in self.processes)
            return
        assert self.struck is not None, f"a verdict without a fault: {decision.text}"
        self.check_moment(decision.text)
        self.check_names(decision.text)
        warnings = [each.text for each in self.decisions[:-1]]
        ends = [text for text in warnings if "end of its script" in text]
        # One for the event, one for the fault, and some for processes that only were slow.
        assert len(warnings) - len(ends) <= 4 and len(ends) <= 8, warnings
        waited = re.search(r"has waited (\d+)", decision.text)
        # A judge that was stopped warns of nothing.
        assert warnings or not waited or int(waited[1]) < T + self.slack, "no warning before"

    def check_moment(self, text):
        passed = self.time - self.struck - self.slack - LATE
        if self.fault in ("killed", "fails"):
            assert passed <= 1, passed
        elif self.fault in ("stopped", "cut off"):
            assert passed <= self.longest, passed
        elif self.fault == "finishes early" and "Missing" in text:
            waited = re.search(r"has waited ([\d.]+) s", text)
            # The others may have waited for a validation.
            exempt = "end of its script" in text or self.event in ("validation", LONG)
            assert exempt or float(waited[1]) <= 0.15 * self.longest + 2 * LATE + self.slack, text

    def check_names(self, text):
        """Named is who was at fault; also missing are those that wait themselves."""
        missing, _, others = text.partition("The others")
        missing, others = named_in(missing.partition("Missing")[2]), named_in(others)
        assert "does not answer" not in text or self.fault == "loses an answer", text
        if self.fault == "loses an answer" and "the store does not answer" in text:
            return
        assert re.search(FAULTS[self.fault], {**others, **missing}[self.culprit]), text
        title = text.partition(": rank ")[0]
        for rank, reason in missing.items():
            assert not reason.startswith(f"waiting in {title} for"), text
            comes = self.now < self.processes[rank].computes_until + LATE
            waits = reason.startswith("waiting in") or "waits in pull" in reason
            assert rank == self.culprit or waits or comes or rank in self.touched, text


def key_of(step):
    return step if isinstance(step, str) else (step.name, step.first)


def named_in(text):
    """{rank: reason}"""
    named = {}
    for ranks, reason in re.findall(r"ranks? ([\d, -]+) \(((?:[^()]|\([^()]*\))*)\)", text):
        for one in ranks.split(", "):
            first, _, last = one.partition("-")
            named.update(dict.fromkeys(range(int(first), int(last or first) + 1), reason))
    return named


@pytest.mark.parametrize("part", range(4))
def test_random_histories(part):
    """Nobody waits past the timeout; a job in which all move goes on; who is named was missing; and
    the decision is one."""
    for seed in range(SEED + part * CASES // 4, SEED + (part + 1) * CASES // 4):
        history = History(seed)
        try:
            history.run()
        except AssertionError as error:
            what = f"{history.fault} of {history.culprit}, {history.event} of {history.victim}"
            pytest.fail(f"SEED={seed} CASES=4: {what}: {error}")


# Texts.


def test_how_reasons_are_put_together():
    assert reasons({}) == "none"
    assert reasons({1: ("x", 2.0), 2: ("x", 3.0), 3: ("x", None)}) == "ranks 1-3 (x)"
    assert reasons({1: ("x", 2.0), 2: ("y", None)}) == "rank 1 (x for 2 s), rank 2 (y)"


def test_a_report_travels_as_json():
    report = Report(
        [Exchange("a 1", "a", 1.5, 10.0, 0, 2)],
        {"a": True},
        "b",
        Place("c", 1.0, None),
        (FAILED, "\N{GRINNING FACE}"),
    )
    for each in (report, Report([])):
        assert Report.from_json(json.loads(json.dumps(each))) == each


def test_a_verdict_has_a_longest_text():
    """Which fits a message, whatever 1,000 processes have to say."""
    judge = Judge(1000, "the store", 10)
    judge.begin(0)
    for rank in range(1000):
        judge.report(rank, Report(place=Place(f"train.py:{rank}", 1)), 0)
    [(kind, text)] = judge.report(1, Report(status=(FAILED, "a bad batch")), 1)
    assert kind == VERDICT and text.startswith("Missing: rank 1 (failed: a bad batch). The others:")
    assert len(text) == 8000 and judge.decided == (kind, text)
