"""A forked child holds no lock that only a thread of its parent could release."""

from __future__ import annotations

from tests.support.scripts import run_script


def test_a_fork_does_not_wait_for_a_loop_that_waits_or_was_closed() -> None:
    done = run_script(
        """
        from s3cache.util import threads
        threads.LIMIT_S = 600.0
        async def forever(): await asyncio.Event().wait()
        running = background().submit(forever())  # nothing else holds it
        loop = threads.new_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        child = os.fork()
        if child == 0: os._exit(0)
        assert join(child) == 0
        background().stop()
        child = os.fork()
        if child == 0: os._exit(0)
        assert join(child) == 0
        """
    )
    assert done.stderr == ""


def test_a_fork_stops_waiting_for_a_callback_that_needs_its_lock() -> None:
    """No thread can release the lock while the fork waits: the child starts after a time limit."""
    done = run_script(
        """
        from s3cache.util import threads
        threads.LIMIT_S = 0.1
        lock, entered = threading.Lock(), threading.Event()
        def work():
            entered.set()
            with lock: pass
        with lock:
            background().call(work)
            entered.wait()
            child = os.fork()
        if child == 0:
            async def where(): return os.getpid()
            os._exit(0 if background().wait(where(), 10) == os.getpid() else 1)
        assert join(child) == 0
        """
    )
    assert done.stderr == ""


def test_no_callback_is_half_done_in_a_forked_child() -> None:
    done = run_script(
        """
        from s3cache.util import threads
        state, stop = "out", False
        async def work():
            global state
            while not stop:
                state = "in"
                time.sleep(0.001)
                state = "out"
                await asyncio.sleep(0)
        working = background().submit(work())
        statuses = []
        for _ in range(50):
            child = os.fork()
            if child == 0: os._exit(0 if state == "out" else 1)
            statuses.append(join(child))
        stop = True
        working.result(10)
        print(statuses.count(0))
        """
    )
    assert (done.stdout.strip(), done.stderr) == ("50", "")


def test_a_child_renews_objects_in_the_order_they_were_registered() -> None:
    """It continues after one that fails, skips objects that are gone, and closes unshared files."""
    done = run_script(
        """
        import tempfile
        from s3cache.util import threads
        called = []
        class Thing:
            def __init__(self, name):
                self.name = name
                threads.call_in_child(self.renew)
            def renew(self):
                called.append(self.name)
                if self.name == "bad": raise ValueError("bad")
        file = tempfile.NamedTemporaryFile()
        fd = threads.open_unshared(file.name, os.O_RDWR)
        things = [Thing(name) for name in ("one", "bad", "two", "gone")]
        threads.call_in_child(lambda: called.append("function"))
        del things[-1]
        child = os.fork()
        if child == 0:
            print(*called, flush=True)
            try: os.fstat(fd)
            except OSError: os._exit(0)  # a child has no descriptor of an unshared file
            os._exit(1)
        assert join(child) == 0
        os.fstat(fd)
        threads.close_unshared(fd)
        print(*called)
        """
    )
    assert done.stdout.splitlines() == ["one bad two function", ""]
    assert "ValueError: bad" in done.stderr
