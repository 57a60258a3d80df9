"""The job starts warm on a machine that has never run it, and does the same there."""

from s3cache.testing import MachineFactory, MotoBucket, assert_warm_start


def test_the_second_machine_compiles_nothing(
    s3cache_machine: MachineFactory, s3cache_moto: MotoBucket
) -> None:
    first = s3cache_machine(**s3cache_moto.environment).run("train.py", "--steps", "2")
    second = s3cache_machine(**s3cache_moto.environment).run("train.py", "--steps", "2")
    assert_warm_start(first, second)
