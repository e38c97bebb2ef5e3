"""make chaos ARGS="--faults 300 --seed 7": something happens to jobs, and what becomes of them.

Each fault is drawn from a seed of its own, which the table names: --only SEED repeats one. With
--healthy, only what a job has to survive happens."""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from distributed_cluster import Cluster, TwoMachines, has_horovod, has_namespaces

WORKER = str(Path(__file__).with_name("chaos_worker.py"))
TIMEOUT = 5.0
# The bar: what may pass beyond the timeout until all have ended.
SLACK = 3.0
# A process that goes on alone at the end has so many timeouts.
ALONE = 10
MOMENTS = "start before first forward backward step validation saving end".split()
FAULTS = "SIGKILL SIGTERM SIGSTOP pause raise _exit_0 _exit_3 loop memory disk garbage".split()
FAULTS += "suspend sleep files".split()
GOES_ON = "pause garbage cut suspend sleep files save operator queue".split()


def draw(seed, healthy=False):
    """A random fault, as a dict. healthy: one that the job survives."""
    rng = random.Random(seed)
    engine = rng.choice(["kvstore", "kvstore", "horovod"] if has_horovod() else ["kvstore"])
    workers = rng.choice([2, 2, 3])
    chaos = {
        "engine": engine,
        "workers": workers,
        "by_hand": engine == "kvstore" and rng.random() < 0.3,
        "join": rng.random() < 0.4,
        "victim": "worker",
        "fault": rng.choice(FAULTS).replace("_exit_", "_exit "),
        "moment": rng.choice(MOMENTS),
        "rank": rng.randrange(workers),
        "timeout": TIMEOUT,
    }
    if healthy:
        chaos["fault"] = rng.choice(GOES_ON)
        if chaos["fault"] == "cut" and not (engine == "kvstore" and has_namespaces()):
            chaos["fault"] = "queue"
    if healthy and chaos["fault"] == "cut":
        chaos.update(victim="link", workers=2, by_hand=False, timeout=4 * TIMEOUT)
        chaos.update(rank=chaos["rank"] % 2, moment=rng.choice(MOMENTS[1:]))
    elif healthy:
        pass
    elif engine == "kvstore" and rng.random() < 0.15:
        chaos["victim"] = "server" if chaos["by_hand"] else rng.choice(["server", "scheduler"])
        chaos["fault"] = rng.choice(["SIGKILL", "SIGSTOP"])
        chaos["moment"] = rng.choice(MOMENTS[1:6])
    elif engine == "kvstore" and rng.random() < 0.1 and has_namespaces():
        chaos.update(victim="link", fault="cut", workers=2, by_hand=False)
        chaos["rank"] %= 2
        if rng.random() < 0.4:
            chaos["fault"] = "cut off"
        else:
            # TCP may need as long again when the link is back.
            chaos["timeout"] = 4 * TIMEOUT
        # MXNet's shutdown, which comes last, has another limit.
        chaos["moment"] = rng.choice(MOMENTS[1:-2] if chaos["fault"] == "cut off" else MOMENTS[1:])
    if chaos["fault"] == "garbage" and chaos["moment"] == "start":
        chaos["moment"] = "before"  # No port is open earlier.
    # Two machines share none.
    chaos["memory"] = int(rng.random() < 0.5 and chaos["victim"] != "link")
    return chaos


class Outcome:
    """What became of a job.

    seconds: from the fault until all had ended, but for a process that is stopped by hand. named:
    whether the output names who it happened to. wrong: what fell short, as texts.
    """

    def __init__(self, seed, healthy=False):
        self.chaos = chaos = draw(seed, healthy)
        self.seed, self.seconds, self.named, self.wrong = seed, None, None, []
        with tempfile.TemporaryDirectory() as folder:
            self.cluster = (TwoMachines if chaos["victim"] == "link" else Cluster)(
                Path(folder),
                chaos["workers"],
                [],
                engine=chaos["engine"],
                by_hand=chaos["by_hand"],
                script=WORKER,
                GLUON_SYNCBN_TIMEOUT=str(chaos["timeout"]),
                GLUON_SYNCBN_SHARED_MEMORY=str(chaos["memory"]),
                CHAOS=json.dumps(chaos),
            )
            try:
                self._watch()
            finally:
                self.cluster.clean()

    def _watch(self):
        cluster, chaos = self.cluster, self.chaos
        rank = 0 if chaos["by_hand"] and chaos["moment"] == "start" else chaos["rank"]
        try:
            self.pid, begin = cluster.wait_for("struck", ranks=[rank])[rank]
        except pytest.fail.Exception:
            self.output, self.codes = cluster.all_output(), ""
            self.wrong.append("it ended before the fault")
            return
        limit = TIMEOUT + SLACK
        if chaos["fault"] == "cut":
            cluster.cut(TIMEOUT / 2)
            limit += TIMEOUT / 2
        elif chaos["fault"] == "cut off":
            cluster.cut(None)
        elif chaos["fault"] == "suspend":
            self._suspend(3 * TIMEOUT)
            limit += 3 * TIMEOUT
        elif chaos["victim"] != "worker":
            os.kill(cluster.find(chaos["victim"]), getattr(signal, chaos["fault"]))
        if chaos["fault"] == "pause":
            time.sleep(TIMEOUT / 2)
            os.kill(self.pid, signal.SIGCONT)
        if chaos["fault"] == "loop" and MOMENTS.index(chaos["moment"]) > MOMENTS.index("step"):
            limit += (ALONE - 1) * TIMEOUT
        if chaos["fault"] in ("sleep", "save", "operator"):
            limit += 4 * TIMEOUT
        elif chaos["fault"] == "queue":  # As long as it takes.
            limit += 20 * TIMEOUT
        codes = self._codes_until(begin + limit + 20)
        self.seconds = time.time() - begin
        self.output = cluster.all_output()
        ended = {pid: code for pid, code in codes.items() if pid != self._stands()}
        self.codes = " ".join(str(code) for code in ended.values())
        self._judge(ended, limit)

    def _suspend(self, seconds):
        """All processes of the job."""
        processes = self.cluster.running()
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in processes:
            process.resume()

    def _codes_until(self, deadline):
        """Exit codes by process, when all have ended that can."""
        processes = self.cluster.processes
        while time.time() < deadline:
            left = [p.pid for p in processes if p.poll() is None]
            if not left or left == [self._stands()]:
                break
            time.sleep(0.02)
        return {p.pid: p.poll() for p in processes}

    def _stands(self):
        """The process that nobody ends without a launcher, or None."""
        chaos = self.chaos
        stands = chaos["by_hand"] and chaos["victim"] == "worker"
        return self.pid if stands and chaos["fault"] in ("SIGSTOP", "loop") else None

    def _judge(self, ended, limit):
        chaos = self.chaos
        if None in ended.values():
            self.wrong.append("a hang")
        elif self.seconds > limit:
            self.wrong.append("late")
        if not chaos["by_hand"]:
            time.sleep(0.2)
            if self.cluster.running():
                self.wrong.append("processes are left")
        if chaos["fault"] in GOES_ON:
            if any(ended.values()):
                self.wrong.append("it did not go on")
            return
        if not any(ended.values()):
            self.wrong.append("no exit code says so")
        self.named = self._is_named()
        if not self.named:
            self.wrong.append("nobody names it")

    def _is_named(self):
        """Before there is a store nobody knows the name, but the launcher that of a process that
        ends or is stopped."""
        chaos, rank = self.chaos, self.chaos["rank"]
        if chaos["moment"] == "start" and (chaos["by_hand"] or chaos["fault"] == "loop"):
            return True
        if chaos["victim"] == "link":
            return bool(re.search(r"Missing: rank [01] \(no answer", self.output))
        if chaos["victim"] != "worker":
            words = rf"launch: {chaos['victim']}|by a signal: [^.]*{chaos['victim']}|"
            return bool(
                re.search(words + f"KVStore's {chaos['victim']} (does|has) not", self.output)
            )
        ranks = rf"ranks? ([\d, -]*\b)?{rank}\b[\d, -]* \((?![^()]*waits in)"
        launcher = rf"launch: worker {rank} |by a signal: [^.]*worker {rank}\b"
        others = rf"(Missing: |The others: |\), ){ranks}"
        return bool(re.search(f"{launcher}|{others}", self.output))

    def row(self):
        chaos = self.chaos
        start = "hand" if chaos["by_hand"] else "launch"
        join = "join" if chaos["join"] else "-"
        who = f"rank {chaos['rank']}" if chaos["victim"] == "worker" else chaos["victim"]
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"{self.seed:>8} {chaos['engine']:<8}{'memory' if chaos['memory'] else 'store':<7}"
            f"{start:<7}{chaos['workers']} "
            f"{join:<5}{chaos['fault']:<9}{chaos['moment']:<11}{who:<10}"
            f"{seconds:>6}  {self.codes:<9} {'; '.join(self.wrong) or 'as it should'}"
        )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (%(default)s)")
    parser.add_argument("--healthy", action="store_true", help="what a job has to survive")
    parser.add_argument("--only", metavar="SEED", help="this one alone, with its output")
    parser.add_argument("--at-a-time", type=int, default=2, metavar="N", help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.only:
        outcome = Outcome(options.only, options.healthy)
        print(outcome.output, outcome.row(), sep="\n")
        return int(bool(outcome.wrong))
    seeds = [f"{options.seed}-{number}" for number in range(options.faults)]
    print("    seed engine  by     start  n join fault    moment     who       seconds  codes")
    outcomes = []
    with ThreadPoolExecutor(options.at_a_time) as executor:
        for outcome in executor.map(lambda seed: Outcome(seed, options.healthy), seeds):
            print(outcome.row(), flush=True)
            if outcome.wrong:
                print(*outcome.output.splitlines()[-200:], sep="\n", flush=True)
            outcomes.append(outcome)
    return summarize(outcomes)


def summarize(outcomes):
    ended = [o.seconds for o in outcomes if o.named is not None]
    named = sum(bool(o.named) for o in outcomes)
    wrong = [o for o in outcomes if o.wrong]
    hangs = sum("a hang" in o.wrong for o in outcomes)
    print(
        f"{len(outcomes)} faults, {hangs} hangs. {len(ended)} jobs ended, after "
        f"{statistics.median(ended or [0]):.1f} s in the median and {max(ended or [0]):.1f} s at "
        f"most, and {named} named who it was. {len(outcomes) - len(ended)} were to go on. "
        f"{len(wrong)} fell short: {', '.join(o.seed for o in wrong) or 'none'}."
    )
    return int(bool(wrong))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
