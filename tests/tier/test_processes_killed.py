"""Processes that are killed: usage exact, objects whole, each pending upload adopted once."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.tier.processes import finish

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize("verb", ["put", "replace", "put_pending", "evict", "delete"])
def test_killed_before_any_system_call(start: Start, verb: str) -> None:
    """Usage is exact, objects are whole, and each pending upload is adopted once."""
    script = """
        from tests.support.moments import before_call

        verb, tier = sys.argv[2], None

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        def use():
            if verb in ("put", "replace", "evict"):
                name = "old/1" if verb == "replace" else "new/1"
                tier.put(name, body(name, b"new" * 1000))
            elif verb == "put_pending":
                tier.put_pending("new/1", body("new/1", b"new"))
            else:
                getattr(tier, verb)("old/1")

        for moment in itertools.count(1):
            shutil.rmtree(root, ignore_errors=True)
            tier = DiskTier(root, max_bytes=1 << 20, max_files=2 if verb == "evict" else 4)
            for name in ("old/1", "old/2"):
                tier.put(name, body(name, b"old"))
            child = os.fork()
            if child == 0:
                with before_call(moment, die):
                    use()
                os._exit(0)
            killed = os.waitpid(child, 0)[1] != 0
            tier = DiskTier(root, max_bytes=1 << 20, max_files=2 if verb == "evict" else 4)
            check_all(tier)
            # An upload without an object may be pending: it costs the adopter nothing.
            adopted = tier.adopt()
            if verb == "put_pending" and tier.holds("new/1"):
                assert adopted == ["new/1"]
            for left in Path(root, "staging").iterdir():
                os.utime(left, (0, 0))
            ObjectFiles(root).sweep()
            assert os.listdir(Path(root, "staging")) == []
            tier.close()
            if not killed:
                break
        assert moment > 5
        """
    finish(start(script, verb))
