"""Calls that wait when the process ends, is interrupted, or forks. Each test runs a script."""

import os
import signal
import textwrap
import time

import programs
import pytest
from mxnet_launch import runner
from devices import KIND

STATIC = "static_alloc=True, static_shape=True"


@pytest.mark.long
@pytest.mark.parametrize(
    "ending, expected, hybridize",
    [
        ("", 0, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit(3)", 3, STATIC),
        ("raise RuntimeError('between two devices')", 1, None),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
    ],
)
def test_a_script_that_ends_while_a_call_waits(start, ending, expected, hybridize):
    body = f"""
        if {hybridize is not None}:
            net.hybridize({hybridize or ""})
        losses = step()
        mx.nd.waitall()
        losses = step(devices[:1])
        wait_until_a_call_waits()
        print(time.time(), flush=True)
        {ending}
    """
    # In one of three tries, as the machine may be busy and MXNet takes time to shut down.
    most = 10
    took = []
    while len(took) < 3 and not any(seconds < most for seconds in took):
        script = start(body)
        assert script.end(60) == expected, script.errors
        took.append(time.time() - float(script.output[0]))
        errors = script.errors
        assert "terminate called" not in errors and "Segmentation" not in errors
        assert "The process ended before" in errors and f"Missing: {KIND}(1)" in errors
    assert min(took) < most, errors


@pytest.mark.long
def test_the_last_steps_are_completed(run):
    """The script does not wait for their results, and one device is always slower."""
    body = """
        a = mx.nd.ones((700, 700), ctx=devices[1]) / 700
        for _ in range(6):
            with mx.autograd.record():
                losses = [net(data[0]).sum()]
                for _ in range(8):
                    a = mx.nd.dot(a, a)
                losses.append(net(data[1] + a[:1, :1].reshape((1, 1, 1, 1))).sum())
            mx.autograd.backward(losses)
        wait_until_a_call_waits()
    """
    assert run(body) == ("", "")


def test_other_processes_are_told_of_an_exception_that_cannot_be_printed(start):
    """Even if one of the stores has failed."""
    script = start("""
        class Unprintable(Exception):
            def __str__(self):
                raise ValueError

        from gluon_syncbn.supervision import exit

        exit.at_exit(print)
        exit.at_exit(lambda failure: 1 / 0)
        raise Unprintable
    """)
    assert script.end() == 1 and script.output == ["Unprintable: Unprintable\n"], script.errors


PROMPT = "import code; code.interact()"


@pytest.mark.parametrize(
    "options, body, typed, code",
    [
        (["-i"], "", "1 / 0\n", 0),
        (["-i"], "raise ValueError", "", 0),
        ([], PROMPT, "1 / 0\n", 0),
        ([], f"{PROMPT}\nraise KeyError(3)", "1 / 0\n", 1),
        ([runner.__file__, "run", "1:0"], PROMPT, "1 / 0\n", 0),
    ],
    ids=["an interpreter", "after a script", "in a script", "before an error", "in a worker"],
)
def test_an_error_that_a_prompt_survives_is_not_the_end(options, body, typed, code, tmp_path):
    """Python keeps it in sys.last_value all the same."""
    script = tmp_path / "script.py"
    script.write_text(f"from gluon_syncbn.supervision import exit\nexit.at_exit(print)\n{body}")
    done = programs.run([*options, script], input=typed)
    assert "Error" in done.stderr and done.returncode == code, done
    assert ("KeyError: 3\n" if code else "None\n") in done.stdout, done


def interrupt(script):
    """The exit code of a script that Ctrl-C ends in good time."""
    begin = time.time()
    script.process.send_signal(signal.SIGINT)
    code = script.end(60)
    assert time.time() - begin < 3
    return code


def test_ctrl_c_during_the_wait_for_other_processes_at_the_end(start):
    body = """
        from gluon_syncbn.supervision import exit

        def leave(failure):
            print("waits", failure, flush=True)
            time.sleep(60)

        exit.at_exit(leave)
    """
    script = start(body)
    script.wait_for("waits None\n")
    assert interrupt(script) == 128 + signal.SIGINT
    assert "Traceback" not in script.errors, script.errors
    assert "Interrupted at the end of the script" in script.errors


def test_ctrl_c_while_the_main_thread_waits_for_a_result(start):
    """Inside MXNet, Python does not see the signal. Training may go on after it."""
    body = """
        loss = step(devices[:1])[0]
        wait_until_a_call_waits()
        try:
            print("waiting", flush=True)
            loss.wait_to_read()
        except KeyboardInterrupt:
            print(time.time(), flush=True)
            clear_errors()
            for _ in range(3):
                for loss in step():
                    loss.wait_to_read()
            print("trained on", flush=True)
            raise
    """
    script = start(body)
    script.wait_for("waiting")
    time.sleep(0.3)
    begin = time.time()
    script.process.send_signal(signal.SIGINT)
    assert script.end(60) == -signal.SIGINT and "KeyboardInterrupt" in script.errors
    first, ended, last = script.output
    assert (first, last) == ("waiting\n", "trained on\n") and float(ended) - begin < 3


def test_ctrl_c_while_the_main_thread_waits_for_another_process(start):
    """In a function of Python that C++ calls, Python drops it."""
    script = start("""
        class Store:
            def probe(self, *delay):
                pass

        store = Store()
        connection = native.Connection(store.probe)
        segment = native.Segment("0123456789abcdef")
        route = connection.shared_memory_route("key", 1, 0, 2, segment)
        print("waiting", flush=True)
        route.exchange("title", 60, [1.0])
    """)
    script.wait_for("waiting")
    time.sleep(0.3)
    assert interrupt(script) == 128 + signal.SIGINT
    assert script.errors.endswith("KeyboardInterrupt\n"), script.errors


def test_a_script_that_handles_ctrl_c_finishes_its_step(run):
    body = """
        stop = []
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
        losses = step(devices[:1])
        wait_until_a_call_waits()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)
        with mx.autograd.record():
            losses.append(net(data[1]).sum())
        print([float(loss.asscalar()) for loss in losses], stop)
    """
    assert run(body)[0].strip().endswith("[1]")


@pytest.mark.long
def test_logging_a_result_that_never_arrives_blocks_no_other_thread(run):
    """The thread that logs it holds the handler's lock and waits for the result."""
    body = """
        import logging

        warned = threading.Event()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)
        # Is told after the first handler, which writes.
        after = logging.Handler(logging.WARNING)
        after.emit = lambda record: warned.set()
        logging.getLogger().addHandler(after)
        with mx.autograd.record():
            logging.info("%s", net(data[0]))
        clear_errors()
        print("gone on" if warned.wait(60) else "no warning")
    """
    output, errors = run(body, GLUON_SYNCBN_TIMEOUT="1")
    assert output == "gone on\n"
    assert "WARNING:gluon_syncbn:" in errors and f"Missing: {KIND}(1)" in errors


def test_fork_between_steps(run):
    """The parent and the child both train on, and so does one with the workers of a DataLoader."""
    body = """
        import multiprocessing
        import warnings
        import numpy as np

        norm = sbn.SyncBatchNorm(in_channels=64)
        norm.initialize(ctx=devices)
        large = [mx.nd.ones((4, 64, 64, 64), ctx=device) for device in devices]

        def use():
            with mx.autograd.record():
                return [norm(x).sum() for x in large]

        def child(queue):
            queue.put([float(loss.asscalar()) for loss in use()])

        context = multiprocessing.get_context("fork")
        for _ in range(3):
            step()
            losses = use()
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            assert queue.get(timeout=30) == [0, 0]
            process.join()
            assert [float(loss.asscalar()) for loss in losses] == [0, 0]
            for loss in step():
                loss.wait_to_read()
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads.
        if os.fork() == 0:
            sys.exit(5)
        assert os.wait()[1] >> 8 == 5
        dataset = mx.gluon.data.ArrayDataset(np.ones((16, 3, 8, 8), "float32"))
        for batch in mx.gluon.data.DataLoader(dataset, batch_size=4, num_workers=2):
            data = mx.gluon.utils.split_and_load(batch, devices)
            for loss in step():
                loss.wait_to_read()
        print("trained on")
    """
    assert run(body) == ("trained on\n", "")


@pytest.mark.long
def test_a_failed_step_before_a_fork_and_after_one(run):
    """With a graph that was traced before the fork. A child may end while a call waits."""
    body = """
        def fail_and_recover(failed):
            try:
                for loss in failed():
                    loss.wait_to_read()
            except mx.MXNetError as error:
                print(f"Missing: {KIND}(1)" in str(error), flush=True)
            clear_errors()
            for loss in step():
                loss.wait_to_read()

        net.hybridize()
        for loss in step():
            loss.wait_to_read()
        child = os.fork()
        if child == 0:
            fail_and_recover(lambda: step(devices[:1]))
            losses = step(devices[:1])
            wait_until_a_call_waits()
            sys.exit(5)
        print(os.WEXITSTATUS(os.waitpid(child, 0)[1]), flush=True)
        failed = step(devices[:1])
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        fail_and_recover(step)
    """
    # Before the end of the script gives up, which is after 2 s.
    assert run(body, GLUON_SYNCBN_TIMEOUT="1.5")[0] == "True\n1\nTrue\n"


def test_the_naive_engine():
    """It runs one device after another, so several are an error at once."""
    body = """
        net = sbn.SyncBatchNorm()
        net.initialize()
        x = mx.nd.array([[1.0, 2.0], [3.0, 6.0]])
        x.attach_grad()
        for _ in range(2):
            with mx.autograd.record():
                y = net(x)
            y.backward()
            net.hybridize()
        print(y.asnumpy().round(3).tolist(), flush=True)
        net.collect_params().reset_ctx([context(0), context(1)])
        with mx.autograd.record():
            net(x)
    """
    head = "import mxnet as mx\nfrom devices import context\nimport gluon_syncbn as sbn\n"
    environment = {**os.environ, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    done = programs.run(["-c", head + textwrap.dedent(body)], env=environment)
    assert done.stdout == "[[-1.0, -1.0], [1.0, 1.0]]\n", done.stderr
    assert done.returncode == 1 and "NaiveEngine" in done.stderr and "MXNetError" in done.stderr


def test_mxnets_engine_may_take_no_more_operations(run):
    """Whichever push after an error fails, nothing hangs and the devices train on."""
    body = """
        import ctypes, types
        from gluon_syncbn.native import _layer as bindings

        PUSH = ctypes.CFUNCTYPE(
            ctypes.c_int, *[ctypes.c_void_p] * 5, ctypes.c_int, ctypes.c_void_p,
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p,
        )
        real = PUSH(("MXEnginePushSyncND", mx.base._LIB))
        names, failing, runs_deleter = [], "", False

        @PUSH
        def push(*arguments):
            name = arguments[-1].decode()
            if name == failing:
                names.append(name)
                if runs_deleter:
                    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(arguments[2])(arguments[1])
                return -1
            return real(*arguments)

        class Library:
            def __getitem__(self, name):
                return push if name == "MXEnginePushSyncND" else mx.base._LIB[name]

        bindings._register(types.SimpleNamespace(base=types.SimpleNamespace(_LIB=Library())))
        operations = "Look Look Probe Probe Report Report"
        for number, operation in enumerate(operations.split()):
            failing, runs_deleter = f"SyncBatchNorm{operation}", number % 2
            bad = mx.nd.random.normal(0, -1, data[0].shape, ctx=devices[0])
            begin = time.time()
            with mx.autograd.record():
                ys = [net(x) for x in (bad, data[1])]
            for y in ys:
                try:
                    y.wait_to_read()
                except mx.MXNetError:
                    pass
            for _ in range(3):
                clear_errors()
            assert time.time() - begin < 10
            assert names and set(names) == {failing} or "Report" in failing, (failing, names)
            names.clear()
            failing = ""
            # What holds an error still is skipped on one device.
            for _ in range(2):
                try:
                    for loss in step():
                        loss.wait_to_read()
                except mx.MXNetError:
                    clear_errors()
            for loss in step():
                loss.wait_to_read()
    """
    # Without a flush, a call that arrives late may wait for the timeout.
    assert run(body, GLUON_SYNCBN_TIMEOUT="4")[0] == ""
