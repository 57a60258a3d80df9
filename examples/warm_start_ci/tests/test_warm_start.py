"""The job starts warm on a machine that has never run it, and does the same there."""

from s3cache.testing import MachineFactory, MotoBucket


def test_the_second_machine_compiles_nothing(
    s3cache_machine: MachineFactory, s3cache_moto: MotoBucket
) -> None:
    first = s3cache_machine(**s3cache_moto.environment).run("train.py", "--steps", "2")
    assert first.stats.uploaded == first.stats.saved > 0
    assert not first.stats.bypassed, first.stats.bypass_reasons

    second = s3cache_machine(**s3cache_moto.environment).run("train.py", "--steps", "2")
    assert second.stats.hits["remote"] == first.stats.saved
    assert not second.stats.misses
    assert second.stats.saved == 0
    assert second.stdout == first.stdout
